"""Imported by the server from which ranks are forked: what no rank has to do again.

Import graphshard, and find out which vector instructions Inductor may use: for each kind, torch
compiles a program and loads it in another process, which takes every rank 1.5 s otherwise.
"""

import torch.distributed.checkpoint.state_dict  # noqa: F401
from torch._inductor.cpu_vec_isa import pick_vec_isa

from graphshard import *  # noqa: F403

pick_vec_isa()
