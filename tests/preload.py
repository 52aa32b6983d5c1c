"""Imported by the server from which ranks are forked, so that no rank has to import graphshard."""

import torch.distributed.checkpoint.state_dict  # noqa: F401

from graphshard import *  # noqa: F403
