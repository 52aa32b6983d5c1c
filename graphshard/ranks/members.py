"""The ranks that share one call log: a process group, reduced to what the log needs."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from .._torch.distributed import (
    group_timeout_s,
    has_fake_ranks,
    is_registered,
    process_group,
    store_of,
    uses_only_gloo,
)
from .gloo_abort import abort


class Members:
    """The ranks of a process group, which may be destroyed in the meantime.

    Attributes:
        name: name of the group.
        rank: this rank's number in the group.
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
        """Return a new connection to the store that all members share."""
        group = self._group()
        assert group is not None
        return store_of(group)

    def exist(self) -> bool:
        """Return whether the group still exists, that is, has not been destroyed."""
        return is_registered(self._group())

    def timeout_s(self) -> float:
        """Return the timeout of the group's collectives; 0 if the group is gone."""
        group = self._group()
        return 0.0 if group is None else group_timeout_s(group)

    def mismatch_is_fatal(self) -> bool:
        """Return whether collectives of mismatched sizes end the process.

        Gloo ends it from its own thread, where no one can catch the error; other backends hang.
        """
        group = self._group()
        return group is not None and uses_only_gloo(group)

    def release_also(self, group: dist.ProcessGroup) -> None:
        """Have :meth:`abort` also release ranks that are blocked in ``group``.

        Args:
            group: process group of some of the members.
        """
        # Groups with fake ranks never block, and their store makes no connections.
        if group not in self._stores and not has_fake_ranks(group):
            self._stores[group] = store_of(group)

    def release_also_by_name(self, name: str) -> None:
        """Call :meth:`release_also` for a group by name; its ranks need not all be members."""
        self.release_also(process_group(name))

    def abort(self) -> None:
        """Make this rank's blocked collectives raise, and all later ones."""
        for group, store in list(self._stores.items()):
            abort(group, store)
