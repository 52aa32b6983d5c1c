"""Fully sharded training that is compiled, from one line.

model = torch.compile(model, backend=graphshard.backend(mesh))
"""

from .backend import Backend, backend, shard
from .float8 import Float8Policy
from .memory import MemoryReport, memory_report
from .microbatches import no_sync, set_requires_all_reduce, set_requires_gradient_sync
from .schedule import SchedulePolicy

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "Float8Policy",
    "MemoryReport",
    "SchedulePolicy",
    "__version__",
    "backend",
    "memory_report",
    "no_sync",
    "set_requires_all_reduce",
    "set_requires_gradient_sync",
    "shard",
]
