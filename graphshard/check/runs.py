"""Calls of graphs: what they launch, and when they wait for it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launch:
    """A collective, or host copies that go together.

    Attributes:
        op: name of the operator.
        group: name of the process group; "" of a host copy.
    """

    op: str
    group: str


@dataclass
class GraphRun:
    """One call of a graph.

    Attributes:
        launches: in order.
        order: a number in ``launches`` where one is launched; its complement (``~``) where the
            current stream first waits for it.
        arguments: blocks that it is given.
        actions: positions of its first action, and behind its last one.
    """

    launches: list[Launch] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    arguments: tuple[int, ...] = ()
    actions: tuple[int, int] = (0, 0)

    def launch(self, launch: Launch) -> int:
        """Append a launch and return its number."""
        self.launches.append(launch)
        self.order.append(len(self.launches) - 1)
        return self.order[-1]

    def wait(self, number: int) -> None:
        """Append a wait, unless there is one."""
        if ~number not in self.order:
            self.order.append(~number)
