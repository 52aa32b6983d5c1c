"""Compiled, fully sharded training with one line of code.

model = torch.compile(model, backend=graphshard.backend(mesh))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import optim as optim
    from . import show as show
    from .dynamo_backend import Backend as Backend
    from .dynamo_backend import backend as backend
    from .dynamo_backend import shard as shard
    from .forecast.cluster import Cluster as Cluster
    from .forecast.cluster import cluster as cluster
    from .forecast.forecast import Forecast as Forecast
    from .forecast.plan import plan as plan
    from .options.float8_policy import Float8Policy as Float8Policy
    from .options.schedule_policy import SchedulePolicy as SchedulePolicy
    from .params.broadcast import sync_buffers as sync_buffers
    from .params.clip_grad import clip_grad_norm_ as clip_grad_norm_
    from .params.grad_sync import no_sync as no_sync
    from .params.grad_sync import set_gradient_divide_factor as set_gradient_divide_factor
    from .params.grad_sync import set_requires_all_reduce as set_requires_all_reduce
    from .params.grad_sync import set_requires_gradient_sync as set_requires_gradient_sync
    from .params.memory_report import MemoryReport as MemoryReport
    from .params.memory_report import memory_report as memory_report
    from .params.meta_init import materialize as materialize
    from .params.state_dict import full_state_dict as full_state_dict
    from .params.state_dict import load_full_state_dict as load_full_state_dict
    from .pipeline.cache_files import load_compiled as load_compiled
    from .pipeline.cache_files import save_compiled as save_compiled

__version__ = "0.1.0"

# Import modules lazily, since importing torch._dynamo and Inductor takes seconds.
_MODULES = {
    "Backend": "dynamo_backend",
    "Cluster": "forecast.cluster",
    "Float8Policy": "options.float8_policy",
    "Forecast": "forecast.forecast",
    "MemoryReport": "params.memory_report",
    "SchedulePolicy": "options.schedule_policy",
    "backend": "dynamo_backend",
    "clip_grad_norm_": "params.clip_grad",
    "cluster": "forecast.cluster",
    "full_state_dict": "params.state_dict",
    "load_compiled": "pipeline.cache_files",
    "load_full_state_dict": "params.state_dict",
    "materialize": "params.meta_init",
    "memory_report": "params.memory_report",
    "no_sync": "params.grad_sync",
    "optim": "optim",
    "plan": "forecast.plan",
    "save_compiled": "pipeline.cache_files",
    "set_gradient_divide_factor": "params.grad_sync",
    "set_requires_all_reduce": "params.grad_sync",
    "set_requires_gradient_sync": "params.grad_sync",
    "shard": "dynamo_backend",
    "show": "show",
    "sync_buffers": "params.broadcast",
}
__all__ = ["__version__", *(name for name, module in _MODULES.items() if name != module)]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_MODULES[name]}", __name__)
    value = globals()[name] = module if name == _MODULES[name] else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
