"""Release blocked gloo collectives by shutting down the connections that they wait on.

A connection is found by the address of one of its ends, which gloo leaves in the group's store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterator

import torch.distributed as dist

from .._torch.distributed import device_types


def abort(group: dist.ProcessGroup, store: dist.Store) -> None:
    """Make collectives of ``group`` that are blocked on this rank raise, and all later ones.

    ``ProcessGroup.abort`` does this for NCCL and does nothing for gloo. A gloo collective raises
    when a peer closes its connection, so this shuts down the connections themselves.
    """
    shut_down(list(_gloo_addresses(group, store)))
    group.abort()


def shut_down(listeners: Collection[bytes]) -> None:
    """Shut down every TCP connection of this process that has one of ``listeners`` as an end.

    Args:
        listeners: byte strings that contain a ``struct sockaddr_in`` or ``sockaddr_in6``.
    """
    for number in map(int, os.listdir("/dev/fd") if listeners else ()):
        with contextlib.suppress(OSError):  # closed since it was listed, or not connected
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if any(end in listener for end in _ends(connection) for listener in listeners):
                    connection.shutdown(socket.SHUT_RDWR)


def _ends(connection: socket.socket) -> Iterator[bytes]:
    """Yield both ends as ``struct sockaddr_in`` or ``sockaddr_in6``, cut after the host."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        flow = b"" if connection.family == socket.AF_INET else bytes(4)
        for host, port, *_ in (connection.getsockname(), connection.getpeername()):
            start = struct.pack("=H", connection.family) + struct.pack("!H", port)
            yield start + flow + socket.inet_pton(connection.family, host)


def _gloo_addresses(group: dist.ProcessGroup, store: dist.Store) -> Iterator[bytes]:
    """Yield what gloo left in the store for every network device of every rank.

    Each value contains the ``sockaddr`` on which gloo listens. Every connection has such an address
    at one of its ends.
    """
    for device_type in device_types(group):
        for index in itertools.count():
            keys = [f"{device_type}//{index}/{rank}" for rank in range(group.size())]
            if not store.check(keys):
                break
            yield from map(store.get, keys)
