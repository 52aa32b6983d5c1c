"""torchtitan's Llama 3 configurations, changed to train with graphshard.

--module graphshard.integrations.torchtitan.llama3 --config llama3_8b
"""

from __future__ import annotations

from torchtitan.models.llama3 import config_registry

from .configure import configs_of

# torchtitan's --config names a function in this module.
globals().update(configs_of(config_registry))
