"""torchtitan's configurations of Qwen3, trained by graphshard.

    torchrun --nproc_per_node=8 -m torchtitan.train \
        --module graphshard.integrations.torchtitan.qwen3 --config qwen3_14b
"""

from __future__ import annotations

from torchtitan.models.qwen3 import config_registry

from .configure import configs_of

# torchtitan's --config is the name of a function of this module.
globals().update(configs_of(config_registry))
