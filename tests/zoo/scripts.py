"""Run scripts in forked ranks, which start faster than `torchrun`'s: torch is already imported."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from tests import ranks


def run_script(folder: Path, *arguments: object) -> None:
    """Run the script ``arguments[0]`` in ``folder`` on two ranks, as ``torchrun`` does."""
    ranks.run_fresh(2, _run, folder, [*map(str, arguments)], free_port())


def _run(folder: Path, arguments: Sequence[str], port: int) -> None:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.chdir(folder)
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port
