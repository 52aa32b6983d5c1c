"""What holds for all tests: the root of the repository is importable, so that rank processes find
test modules under the names that pytest gives them; tests marked `gpu` are skipped without CUDA;
hypothesis is deterministic and without deadlines; the garbage collector does not look at what was
imported, compiling is quick, and deep calls find a large stack; idle ranks end with the session."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# --hypothesis-profile on the command line still wins: it is read after this.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # here, since it takes a second that most selections need not spend

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Exempt everything that was imported from garbage collection, and compile quickly."""
    from tests.quick import compile_quicker  # not found before

    compile_quicker()
    gc.freeze()  # torch alone is some 400,000 objects, which every full collection would look at


def pytest_sessionfinish() -> None:
    """End the ranks, if any were started."""
    if ranks := sys.modules.get("tests.ranks"):
        ranks.close_pools()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Call each test on a large stack."""
    from tests.quick import on_large_stack

    test = pyfuncitem.obj
    pyfuncitem.obj = lambda **fixtures: on_large_stack(lambda: test(**fixtures))
    try:
        return (yield)
    finally:
        pyfuncitem.obj = test
