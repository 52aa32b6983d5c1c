"""One-time work done in the fork server, so that ranks do not repeat it.

Import graphshard, and detect the vector instruction sets that Inductor may use: torch compiles a
program for each and loads it in another process, which would take each rank 1.5 s. Last, collect
garbage, and exempt the 400,000 objects left from later collections: 0.25 s for each rank.
"""

import gc

import torch.distributed.checkpoint.state_dict  # noqa: F401
from torch._inductor.cpu_vec_isa import pick_vec_isa

from graphshard import *  # noqa: F403

pick_vec_isa()
gc.collect()
gc.freeze()
