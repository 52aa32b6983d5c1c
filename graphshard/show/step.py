"""Graphs of a training step, their order, and their numbers of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..kinds import GraphKind
from .dump import Dump, param_name

NO_SYNC = "no_sync"


class Phase(NamedTuple):
    """A graph, by its position among the dumps, and its number of runs in a step."""

    graph: int
    runs: int = 1


class _Pair(NamedTuple):
    """The graphs of one compilation: forward and backward, or only one of the two."""

    graphs: tuple[int, ...]  # positions among the dumps
    params: frozenset[str]
    reduces: bool  # whether a graph reduces gradients


def graph_names(dumps: Sequence[Dump]) -> list[str]:
    """Return a name for each graph, as in "forward", "backward, no_sync" and "evaluation".

    Duplicate names are followed by Dynamo's name for the compilation, as in "forward (0/1)", or by
    the graph's position if there is none.
    """
    names = [_kind(dump) for dump in dumps]
    for pair in _split(_pairs(dumps))[1]:
        for i in pair.graphs:
            names[i] += f", {NO_SYNC}"
    return [
        f"{name} ({dump.compiled or i})" if names.count(name) > 1 else name
        for i, (name, dump) in enumerate(zip(names, dumps))
    ]


def _kind(dump: Dump) -> str:
    return "evaluation" if dump.plan.graph == GraphKind.INFERENCE else str(dump.plan.graph)


def training_step(
    dumps: Sequence[Dump], runs: Sequence[int] = (), microbatches: int = 1
) -> list[Phase]:
    """Return the graphs of a training step in order; microbatches under ``no_sync`` come first.

    Of several graphs with the same parameters, such as one for each batch size, the last counts.

    Args:
        dumps: all graphs, each backward graph after its forward graph.
        runs: number of runs of each graph in a profile, which gives the number of microbatches
            under ``no_sync``, at least one. Without a profile, one is assumed.
        microbatches: number of microbatches that reduce gradients.
    """
    syncing, local = _split(_pairs(dumps))
    last = {pair.params: pair for pair in syncing}
    last_local = {pair.params: pair for pair in local}

    def num_local(pair: _Pair) -> int:
        steps, calls = (
            [runs[i] for i in one.graphs] if runs else [1] for one in (last[pair.params], pair)
        )
        return max(1, calls[0] // steps[0]) if steps[0] else 1

    return [
        *_in_order(dumps, last_local.values(), num_local),
        *_in_order(dumps, last.values(), lambda pair: microbatches),
    ]


def _in_order(
    dumps: Sequence[Dump], pairs: Iterable[_Pair], count: Callable[[_Pair], int]
) -> list[Phase]:
    phases = [Phase(i, count(pair)) for pair in pairs for i in pair.graphs]
    forward = [p for p in phases if dumps[p.graph].plan.graph == GraphKind.FORWARD]
    backward = [p for p in phases if dumps[p.graph].plan.graph == GraphKind.BACKWARD]
    return forward + backward[::-1]


def _pairs(dumps: Sequence[Dump]) -> list[_Pair]:
    pairs: list[tuple[int, ...]] = []
    for i, dump in enumerate(dumps):
        if dump.plan.graph == GraphKind.FORWARD:
            pairs.append((i,))
        elif dump.plan.graph == GraphKind.BACKWARD:
            before = dumps[max(0, i - 1)]
            if before.plan.graph == GraphKind.FORWARD and before.compiled == dump.compiled:
                pairs[-1] = (i - 1, i)
            else:
                pairs.append((i,))
    return [_pair(dumps, graphs) for graphs in pairs]


def _pair(dumps: Sequence[Dump], graphs: tuple[int, ...]) -> _Pair:
    plans = [dumps[i].plan for i in graphs]
    names = frozenset(param_name(param) for plan in plans for param in plan.params)
    kinds = {bucket.kind for plan in plans for bucket in plan.buckets}
    return _Pair(
        graphs=graphs,
        # Graphs without parameters are unrelated: use unique keys.
        params=names or frozenset({f"graph {graphs[0]}"}),
        reduces=any(kind.reduces_gradients for kind in kinds),
    )


def _split(pairs: Sequence[_Pair]) -> tuple[list[_Pair], list[_Pair]]:
    """Return the pairs outside of ``no_sync``, and the pairs under it.

    A pair is under ``no_sync`` if it reduces nothing, but another with the same parameters does.
    """
    reduced = {pair.params for pair in pairs if pair.reduces}
    local = [pair for pair in pairs if pair.params in reduced and not pair.reduces]
    return [pair for pair in pairs if pair not in local], local
