"""The members of a process group, with the operations that its call log needs."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import stat
import struct
import termios
import threading
import time
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

QUIET_S = 0.2  # time without data in flight, after which transfers count as finished
FINISH_S = 5.0  # longest wait for transfers to finish: the peer may have stopped
LINGER_S = 1.0  # time for which connections stay open after their reads have ended


class Members:
    """The ranks of a process group, with this process's ``rank``. May outlive the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name, self.rank = group.group_name, group.rank()
        self.global_ranks = dist.get_process_group_ranks(group)
        self._group = weakref.ref(group)
        self._lock = threading.Lock()  # guards ``_stores``
        self._stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store]
        self._stores = weakref.WeakKeyDictionary()
        self.release_also(group)

    def connect(self) -> dist.Store:
        group = self._group()
        assert group is not None
        return store_of(group)

    def exist(self) -> bool:
        return is_registered(self._group())

    def timeout_s(self) -> float:
        """Return the timeout of the group's collectives in seconds, or 0 if the group is gone."""
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
        with self._lock:
            if group not in self._stores and not has_fake_ranks(group):
                self._stores[group] = store_of(group)

    def abort(self) -> None:
        """Make this rank's blocked and later collectives raise; takes 1 to 6 s with gloo."""
        with self._lock:
            stores = list(self._stores.items())
        # For gloo, abort() and shutdown() of a group or its backend do nothing: in torch 2.11 and
        # 2.13, a blocked rank waits until the timeout. But it raises when a connection ends.
        listeners = [address for pair in stores for address in _gloo_addresses(*pair)]
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(c) for c in _connections(listeners)]
            _wait_until_quiet(connections)
            _end_reads(connections)
            for group, _ in stores:
                group.abort()
            stores.clear()  # closes stores, whose ports another job may wait for
            time.sleep(LINGER_S if connections else 0)


# [Note: sends that never end] At the end of a connection, gloo raises in operations that wait for
# the peer, but forgets those in progress: queued sends, and a receive that has begun. They wait
# until the group's timeout (``Pair::signalException`` in gloo/transport/tcp/pair.cc). Gloo also
# queues a send that fails with EPIPE or ECONNRESET until its event loop reads EOF. Therefore,
# ``abort``
# - waits for transfers in progress, which gloo's event loops finish by themselves;
# - ends only this rank's reads, since a send may begin before the event loop reads EOF;
# - keeps connections open for a while, for the sends of peers whose event loop is late.


def _connections(listeners: Collection[bytes]) -> Iterator[socket.socket]:
    """Yield duplicates of this process's TCP connections to or from ``listeners``.

    Each listener contains a ``struct sockaddr_in`` or ``sockaddr_in6``.
    """
    for number in map(int, os.listdir("/dev/fd") if listeners else ()):
        with contextlib.suppress(OSError):  # closed since it was listed, or not connected
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if any(end in listener for end in _ends(connection) for listener in listeners):
                    # socket.dup() would make gloo's reads block.
                    yield socket.socket(fileno=os.dup(connection.fileno()))


def _wait_until_quiet(connections: Collection[socket.socket]) -> None:
    now = time.monotonic()
    give_up, quiet_at = now + FINISH_S, now + QUIET_S
    while (now := time.monotonic()) < min(give_up, quiet_at):
        if any(_num_queued(connection) for connection in connections):
            quiet_at = now + QUIET_S
        time.sleep(QUIET_S / 10)


def _num_queued(connection: socket.socket) -> int:
    """Return the number of bytes not received by the peer or not read here; 0 if unknown."""
    queues = (termios.TIOCOUTQ, termios.FIONREAD)
    with contextlib.suppress(OSError):  # the platform has no such counts for sockets
        sizes = [fcntl.ioctl(connection, queue, bytes(4)) for queue in queues]
        return sum(struct.unpack("i", size)[0] for size in sizes)
    return 0


def _end_reads(connections: Collection[socket.socket]) -> None:
    """Make reads of the connections return EOF once all data is read."""
    # SHUT_RDWR would make sends fail: see [Note: sends that never end].
    for connection in connections:
        with contextlib.suppress(OSError):  # the peer has reset it
            connection.shutdown(socket.SHUT_RD)


def _ends(connection: socket.socket) -> Iterator[bytes]:
    """Yield both ends' addresses as ``sockaddr_in`` or ``sockaddr_in6``, cut after the host."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        flow = b"" if connection.family == socket.AF_INET else bytes(4)
        for host, port, *_ in (connection.getsockname(), connection.getpeername()):
            start = struct.pack("=H", connection.family) + struct.pack("!H", port)
            yield start + flow + socket.inet_pton(connection.family, host)


def _gloo_addresses(group: dist.ProcessGroup, store: dist.Store) -> Iterator[bytes]:
    """Yield the values that gloo stored for every network device of every rank."""
    # Each value contains a ``sockaddr`` on which gloo listens. Every connection of gloo has such an
    # address at one of its ends.
    for device_type in device_types(group):
        for index in itertools.count():
            keys = [f"{device_type}//{index}/{rank}" for rank in range(group.size())]
            if not store.check(keys):
                break
            yield from map(store.get, keys)
