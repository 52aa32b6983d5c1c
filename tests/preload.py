"""One-time work done in the fork server, so that ranks do not repeat it.

Import graphshard, and detect the vector instruction sets that Inductor may use: torch compiles a
program for each and loads it in another process, which would take each rank 1.5 s.
"""

import torch.distributed.checkpoint.state_dict  # noqa: F401
from torch._inductor.cpu_vec_isa import pick_vec_isa

from graphshard import *  # noqa: F403

pick_vec_isa()
