"""With room on the stack no depth of the caller makes each of its calls map memory anew; without
full collections there are none."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import pytest

from graphshard.interpreter import with_stack_room, without_full_collections

CALLS = 200


def _callee() -> None:
    pass


def _faults_of_calls() -> int:
    """Return how many pages are mapped by calls in a loop."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        _callee()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _below(depth: int, function: Callable[[], int]) -> int:
    return _below(depth - 1, function) if depth else function()


def _most_faults() -> int:
    """Return the most pages that are mapped, by how deep and how large the caller's frame is."""
    code = _faults_of_calls.__code__
    sizes = range(code.co_stacksize, code.co_stacksize + 30)
    callers = [
        FunctionType(code.replace(co_stacksize=size), _faults_of_calls.__globals__)
        for size in sizes
    ]
    return max(_below(depth, caller) for depth in range(150) for caller in callers)


def _in_thread(function: Callable[[], int]) -> int:
    """Call a function on a stack of its own, of which pytest has taken nothing."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_no_depth_has_calls_that_map_memory() -> None:
    assert _in_thread(with_stack_room(_most_faults)) < CALLS / 2


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="its later releases keep a spare chunk")
def test_a_depth_has_such_calls_without_room() -> None:
    assert _in_thread(_most_faults) >= CALLS / 2


def test_arguments_and_name_are_those_of_the_function() -> None:
    def add(x: int, *, y: int) -> int:
        return x + y

    assert with_stack_room(add)(1, y=2) == 3 and with_stack_room(add).__name__ == "add"


def _num_full_collections() -> int:
    return gc.get_stats()[-1]["collections"]


def _collections_of_new_objects() -> int:
    """Return how many full collections come of a million objects that stay."""
    before = _num_full_collections()
    kept: list[list[int]] = []
    for _ in range(1_000_000):
        kept.append([])
    return _num_full_collections() - before


@pytest.fixture
def usual_thresholds() -> Iterator[None]:
    """Collect as often as CPython does by default, and not as tests do."""
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("usual_thresholds")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="a collector without generations")
def test_no_collection_of_all_objects() -> None:
    with pytest.raises(KeyError), without_full_collections():
        assert _collections_of_new_objects() == 0
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)
    gc.collect()
    assert _collections_of_new_objects() > 0
