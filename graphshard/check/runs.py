"""Calls of graphs: what each one launches and when it waits."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RecordedLaunch:
    """A collective, or a group of host copies.

    Attributes:
        op: name of the operator.
        group: name of the process group; "" for a host copy.
    """

    op: str
    group: str


@dataclass
class GraphCall:
    """One call of a graph.

    Attributes:
        launches: launches in order.
        order: launches and waits in order: the index in ``launches`` for a launch, its complement
            (``~index``) for the first wait of the current stream.
        arguments: blocks of the arguments.
        actions: positions of its first action and one past its last action.
    """

    launches: list[RecordedLaunch] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    arguments: tuple[int, ...] = ()
    actions: tuple[int, int] = (0, 0)

    def launch(self, launch: RecordedLaunch) -> int:
        """Append a launch and return its index."""
        self.launches.append(launch)
        self.order.append(len(self.launches) - 1)
        return self.order[-1]

    def wait(self, number: int) -> None:
        """Append a wait unless the launch was waited for already."""
        if ~number not in self.order:
            self.order.append(~number)
