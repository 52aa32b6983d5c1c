"""torchtitan's configurations of Qwen3, trained by graphshard.

    torchrun --nproc_per_node=8 -m torchtitan.train \
        --module graphshard.integrations.torchtitan.qwen3 --config qwen3_14b
"""

from __future__ import annotations

from collections.abc import Callable

from torchtitan.models.qwen3 import config_registry
from torchtitan.trainer import Trainer

from .configure import configs_of

_CONFIGS = configs_of(config_registry)


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """Return the configuration of that name; torchtitan's ``--config``."""
    if name not in _CONFIGS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _CONFIGS[name]


def __dir__() -> list[str]:
    return sorted(_CONFIGS)
