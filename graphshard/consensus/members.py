"""The ranks that keep one log of calls: a process group, as far as the log needs one."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from .._torch.distributed import (
    group_timeout_s,
    has_fake_ranks,
    is_of_gloo,
    is_registered,
    process_group,
    store_of,
)
from .gloo_abort import abort


class Members:
    """The ranks of a process group, which may be destroyed meanwhile.

    Attributes:
        name: of the group.
        rank: this rank, as the group numbers its ranks.
        global_ranks: all of them, as the default group numbers them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.name, self.rank = group.group_name, group.rank()
        self.global_ranks = dist.get_process_group_ranks(group)
        self._group = weakref.ref(group)
        self._stores: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.Store]
        self._stores = weakref.WeakKeyDictionary()
        self.involve(group)

    def connect(self) -> dist.Store:
        """Return a new connection to the store that all members share."""
        group = self._group()
        assert group is not None
        return store_of(group)

    def exist(self) -> bool:
        """Return whether the group has not been destroyed."""
        return is_registered(self._group())

    def timeout_s(self) -> float:
        """Return how long a collective of the group may take."""
        group = self._group()
        return 0.0 if group is None else group_timeout_s(group)

    def mix_up_fatally(self) -> bool:
        """Return whether a process ends where ranks call collectives of different sizes.

        Gloo ends it in a thread of its own, which nobody can catch; others hang.
        """
        group = self._group()
        return group is not None and is_of_gloo(group)

    def involve(self, group: dist.ProcessGroup) -> None:
        """Abort collectives of ``group``, too, some of the members."""
        # Nobody is blocked in groups with fake ranks, and their store makes no connections.
        if group not in self._stores and not has_fake_ranks(group):
            self._stores[group] = store_of(group)

    def involve_by_name(self, name: str) -> None:
        """As :meth:`involve`; members may be some of that group."""
        self.involve(process_group(name))

    def abort(self) -> None:
        """Make collectives raise that are blocked on this rank, and all later ones."""
        for group, store in list(self._stores.items()):
            abort(group, store)
