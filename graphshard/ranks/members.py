"""The members of a process group, with the operations that its call log needs."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import stat
import struct
import weakref
from collections.abc import Collection, Iterator

import torch.distributed as dist

from .._torch.distributed import (
    device_types,
    group_timeout_s,
    has_fake_ranks,
    is_registered,
    store_of,
    uses_only_gloo,
)


class Members:
    """The ranks of a process group. May outlive the group.

    Attributes:
        name: name of the group.
        rank: rank of this process in the group.
        global_ranks: global rank of each member.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name, self.rank = group.group_name, group.rank()
        self.global_ranks = dist.get_process_group_ranks(group)
        self._group = weakref.ref(group)
        self._stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store]
        self._stores = weakref.WeakKeyDictionary()
        self.release_also(group)

    def connect(self) -> dist.Store:
        """Return a new connection to the store of all members."""
        group = self._group()
        assert group is not None
        return store_of(group)

    def exist(self) -> bool:
        return is_registered(self._group())

    def timeout_s(self) -> float:
        """Return the timeout of the group's collectives, or 0 if the group is gone."""
        group = self._group()
        return 0.0 if group is None else group_timeout_s(group)

    def mismatch_is_fatal(self) -> bool:
        """Return whether collectives of mismatched sizes end the process."""
        # Gloo raises in its own thread, where the error cannot be caught; other backends hang.
        group = self._group()
        return group is not None and uses_only_gloo(group)

    def release_also(self, group: dist.ProcessGroup) -> None:
        """Have :meth:`abort` also release this rank from collectives of ``group``."""
        # Groups with fake ranks never block, and their store makes no connections.
        if group not in self._stores and not has_fake_ranks(group):
            self._stores[group] = store_of(group)

    def abort(self) -> None:
        """Make this rank's blocked collectives and all later ones raise."""
        for group, store in list(self._stores.items()):
            # For gloo, abort() and shutdown() of a group or its backend do nothing: in torch 2.11
            # and 2.13 a blocked rank waits on until the timeout. It does raise when a peer closes
            # the connection, so the connections are shut down instead.
            _shut_down(list(_gloo_addresses(group, store)))
            group.abort()


def _shut_down(listeners: Collection[bytes]) -> None:
    """Shut down the TCP connections of this process to or from ``listeners``.

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
    """Yield both ends' addresses as ``sockaddr_in`` or ``sockaddr_in6``, cut after the host."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        flow = b"" if connection.family == socket.AF_INET else bytes(4)
        for host, port, *_ in (connection.getsockname(), connection.getpeername()):
            start = struct.pack("=H", connection.family) + struct.pack("!H", port)
            yield start + flow + socket.inet_pton(connection.family, host)


def _gloo_addresses(group: dist.ProcessGroup, store: dist.Store) -> Iterator[bytes]:
    """Yield the values that gloo stored for every network device of every rank."""
    # Each value contains the ``sockaddr`` on which gloo listens. Every connection has such an
    # address at one of its ends.
    for device_type in device_types(group):
        for index in itertools.count():
            keys = [f"{device_type}//{index}/{rank}" for rank in range(group.size())]
            if not store.check(keys):
                break
            yield from map(store.get, keys)
