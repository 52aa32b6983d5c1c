"""Fully sharded training, compiled, from one line.

model = torch.compile(model, backend=graphshard.backend(mesh))
"""

from . import optim as optim
from .dynamo_backend import Backend, backend, shard
from .forecast.cluster import Cluster, cluster
from .forecast.forecast import Forecast
from .forecast.plan import plan
from .options.float8_policy import Float8Policy
from .options.schedule_policy import SchedulePolicy
from .params.buffers import sync_buffers
from .params.full_state_dict import full_state_dict
from .params.grad_sync import (
    no_sync,
    set_gradient_divide_factor,
    set_requires_all_reduce,
    set_requires_gradient_sync,
)
from .params.load_full_state_dict import load_full_state_dict
from .params.materialize import materialize
from .params.memory_report import MemoryReport, memory_report
from .pipeline.saved_compile import load_compiled, save_compiled

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "Cluster",
    "Float8Policy",
    "Forecast",
    "MemoryReport",
    "SchedulePolicy",
    "__version__",
    "backend",
    "cluster",
    "full_state_dict",
    "load_compiled",
    "load_full_state_dict",
    "materialize",
    "memory_report",
    "no_sync",
    "plan",
    "save_compiled",
    "set_gradient_divide_factor",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "shard",
    "sync_buffers",
]
