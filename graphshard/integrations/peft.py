"""peft: the adapters of a sharded model, gathered without the base that they stand in.

state = adapter_state_dict(model)                        # on all ranks
if rank == 0:
    model.save_pretrained("adapters", state_dict=state)  # as PeftModel.from_pretrained loads it
"""

from __future__ import annotations

from ..params.adapters import adapter_state_dict as adapter_state_dict
