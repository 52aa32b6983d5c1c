"""torchtitan's Qwen3 configurations, trained with graphshard: ``--config qwen3_14b``."""

from __future__ import annotations

from torchtitan.models.qwen3 import config_registry

from .configure import configs_of

# torchtitan's --config names a function in this module.
globals().update(configs_of(config_registry))
