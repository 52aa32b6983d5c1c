"""Do one-time work in the fork server, so that ranks do not repeat it.

Imports graphshard, and detects the vector instruction sets that Inductor may use: torch compiles a
program for each and loads it in another process, which would take 1.5 s per rank. Finally, collects
garbage and exempts the remaining 400,000 objects from later collections, which saves 0.25 s per
rank.
"""

import gc

import torch.distributed.checkpoint.state_dict  # noqa: F401
from torch._inductor.cpu_vec_isa import pick_vec_isa

from graphshard import *  # noqa: F403

pick_vec_isa()
gc.collect()
gc.freeze()
