"""peft: gather the adapters of a sharded model, without the base model.

    state = adapter_state_dict(model)                        # on all ranks
    if rank == 0:
        model.save_pretrained("adapters", state_dict=state)

``PeftModel.from_pretrained`` loads that folder.
"""

from __future__ import annotations

from ..params.save_pretrained import adapter_state_dict as adapter_state_dict
