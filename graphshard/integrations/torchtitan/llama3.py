"""torchtitan's configurations of Llama3, trained by graphshard.

    torchrun --nproc_per_node=8 -m torchtitan.train \
        --module graphshard.integrations.torchtitan.llama3 --config llama3_8b
"""

from __future__ import annotations

from torchtitan.models.llama3 import config_registry

from .configure import configs_of

# torchtitan's --config is the name of a function of this module.
globals().update(configs_of(config_registry))
