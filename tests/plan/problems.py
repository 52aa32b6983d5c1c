"""Random scheduling problems, and a cost model for computations by hand."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import strategies as st

from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.plan import Problem, Transfer, UserCollective

WORLD = 4


@dataclass(frozen=True)
class Line:
    """A cost model that is linear in bytes.

    Attributes:
        latency_us: fixed time of a collective.
        us_per_byte: time of a collective, per byte.
        copy_us_per_byte: time of a copy on the device, per byte.
        buffer_cost_us: time of each additional buffer in a collective.
        issue_us: compute time lost to a collective of any size.
        contention: compute time lost during a collective, as a fraction of its time.
    """

    latency_us: float = 10.0
    us_per_byte: float = 1.0
    copy_us_per_byte: float = 0.0
    buffer_cost_us: float = 20.0
    issue_us: float = 30.0
    contention: float = 0.05

    def collective_us(self, kind: str, num_bytes: int, world: int, stride: int = 1) -> float:
        return self.latency_us + num_bytes * self.us_per_byte

    def exchange_us(self, num_bytes: int, world: int, stride: int = 1) -> float:
        return self.latency_us + num_bytes * self.us_per_byte

    def copy_us(self, num_bytes: int) -> float:
        return num_bytes * self.copy_us_per_byte

    def buffer_us(self, world: int, stride: int = 1) -> float:
        return self.buffer_cost_us

    def crosses_nodes(self, world: int, stride: int = 1) -> bool:
        return world > 1

    def slowdown_us(self, lane_us: float) -> float:
        return self.issue_us + self.contention * lane_us


_transfer = functools.partial(Transfer, dtype="float32", casts=False, group="g", world=WORLD)


def gather(
    param: int,
    num_bytes: int,
    due: int,
    last: int | None = None,
    host: bool = False,
    ready: int = 0,
) -> Transfer:
    """Return an all-gather due at step `due`, of a parameter that is freed after step `last`.

    The gather cannot be launched before step `ready`, like one in fp8 whose scale is not known.
    """
    last = due if last is None else last
    return _transfer(
        param=param,
        kind=TransferKind.ALL_GATHER,
        num_bytes=num_bytes,
        shard_bytes=num_bytes // WORLD,
        ready=ready,
        due=due,
        last=last,
        host=host,
    )


def reduction(
    param: int,
    num_bytes: int,
    ready: int,
    num_steps: int,
    num_replicas: int = 1,
    host: bool = False,
) -> Transfer:
    return _transfer(
        param=param,
        kind=TransferKind.REDUCE_SCATTER,
        num_bytes=num_bytes,
        shard_bytes=num_bytes // WORLD,
        ready=ready,
        due=num_steps,
        last=num_steps - 1,
        replicas="r" if num_replicas > 1 else "",
        num_replicas=num_replicas,
        replica_stride=WORLD,
        host=host,
        grad_bytes=num_bytes,
    )


def user_collective(launch: int, num_bytes: int = 10, world: int = 2) -> UserCollective:
    """Return an all-reduce called by the model when step `launch` begins; the next step waits."""
    kind = TransferKind.ALL_REDUCE
    return UserCollective(kind, kind, num_bytes, "t", world, launch, launch + 1)


def problem(
    compute_us: list[float],
    transfers: list[Transfer],
    fixed_bytes: list[int] | None = None,
    fixed_boundary_bytes: list[int] | None = None,
    user_launches: Iterable[int] = (),
) -> Problem:
    """Return a backward problem.

    Args:
        fixed_bytes: memory of each step, apart from transfers.
        fixed_boundary_bytes: memory between steps; by default the smaller of the two steps' memory.
        user_launches: steps that begin with an all-reduce called by the model.
    """
    steps = tuple(f"step{i}" for i in range(len(compute_us)))
    other = fixed_bytes or [0] * len(steps)
    if fixed_boundary_bytes is None:
        around = zip([*other[:1], *other], [*other, *other[-1:]])
        fixed_boundary_bytes = [min(pair) for pair in around] or [0]
    return Problem(
        GraphKind.BACKWARD,
        steps,
        tuple(compute_us),
        tuple(other),
        tuple(fixed_boundary_bytes),
        tuple(transfers),
        user_collectives=tuple(user_collective(step) for step in sorted(user_launches)),
    )


@st.composite
def problems(draw: st.DrawFn, max_replicas: int = 2, on_host: bool = True) -> Problem:
    """Draw a backward problem of gathers, reductions and user collectives.

    Gathers may become ready late, reduced shards may be averaged over replicas, and shards may
    be on the host.
    """
    num_steps = draw(st.integers(1, 8))
    times = st.floats(0, 200, allow_subnormal=False)
    transfers = []
    for param in range(draw(st.integers(0, 8))):
        num_bytes = draw(st.integers(1, 100))
        due = draw(st.integers(0, num_steps - 1))
        host = on_host and draw(st.booleans())
        if draw(st.booleans()):
            last = draw(st.integers(due, num_steps - 1))
            ready = draw(st.integers(0, due))
            transfers.append(gather(param, num_bytes, due, last, host, ready))
        else:
            replicas = draw(st.integers(1, max_replicas))
            transfers.append(reduction(param, num_bytes, due + 1, num_steps, replicas, host))
    return problem(
        draw(st.lists(times, min_size=num_steps, max_size=num_steps)),
        transfers,
        draw(st.lists(st.integers(0, 500), min_size=num_steps, max_size=num_steps)),
        user_launches=draw(st.sets(st.integers(0, num_steps - 1), max_size=3)),
    )


lines = st.builds(
    Line,
    latency_us=st.floats(0, 100, allow_subnormal=False),
    us_per_byte=st.floats(0, 5, allow_subnormal=False),
    copy_us_per_byte=st.floats(0, 1, allow_subnormal=False),
)
