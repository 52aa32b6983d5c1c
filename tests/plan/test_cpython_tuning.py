"""Stack room, which keeps calls from mapping memory, and no full garbage collections."""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType

import pytest

from graphshard.cpython_tuning import with_stack_room, without_full_collections

CALLS = 200


def _callee() -> None:
    pass


def _faults_of_calls() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        _callee()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _below(depth: int, function: Callable[[], int]) -> int:
    return _below(depth - 1, function) if depth else function()


def _most_faults() -> int:
    code = _faults_of_calls.__code__
    sizes = range(code.co_stacksize, code.co_stacksize + 30)
    callers = [
        FunctionType(code.replace(co_stacksize=size), _faults_of_calls.__globals__)
        for size in sizes
    ]
    return max(_below(depth, caller) for depth in range(150) for caller in callers)


def _in_thread(function: Callable[[], int]) -> int:
    """Call a function in a new thread, whose stack has no pytest frames."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_calls_with_stack_room_map_no_memory_at_any_depth() -> None:
    assert _in_thread(with_stack_room(_most_faults)) < CALLS / 2


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="CPython 3.13 may keep a spare chunk")
def test_calls_without_stack_room_map_memory_at_some_depth() -> None:
    assert _in_thread(_most_faults) >= CALLS / 2


def test_with_stack_room_keeps_arguments_and_name() -> None:
    def add(x: int, *, y: int) -> int:
        return x + y

    assert with_stack_room(add)(1, y=2) == 3 and with_stack_room(add).__name__ == "add"


def _num_full_collections() -> int:
    return gc.get_stats()[-1]["collections"]


def _collections_of_new_objects() -> int:
    before = _num_full_collections()
    kept: list[list[int]] = []
    for _ in range(1_000_000):
        kept.append([])
    return _num_full_collections() - before


@pytest.fixture
def usual_thresholds() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("usual_thresholds")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="CPython 3.14 has no GC generations")
def test_without_full_collections_prevents_full_collections() -> None:
    with pytest.raises(KeyError), without_full_collections():
        assert _collections_of_new_objects() == 0
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)
    gc.collect()
    assert _collections_of_new_objects() > 0
