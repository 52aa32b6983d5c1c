"""Order of fused kernels, launches and waits: no wait moves earlier."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor import ir

from graphshard._torch.inductor import KEEP_ORDER, with_planned_order
from graphshard._torch.kernel_order import KeepWaits


@dataclass(frozen=True)
class _Dep:
    name: str


@dataclass(eq=False)
class _Node:
    """A fake node of Inductor's scheduler that writes one buffer of the same name."""

    name: str
    min_order: int
    needs: str = ""
    node: Any = None
    group: Any = ("cuda", (8, 1))
    num_bytes: int = 0
    unmet_dependencies: set[_Dep] = field(init=False)

    def __post_init__(self) -> None:
        self.unmet_dependencies = {_Dep(name) for name in self.needs.split()}

    def get_name(self) -> str:
        return self.name

    def is_reduction(self) -> bool:
        return False

    def get_device(self) -> torch.device:
        return torch.device("cuda")

    def get_buffer_names(self) -> list[str]:
        return [self.name]

    def get_write_buffer_sizes(self) -> int:
        return self.num_bytes


def _wait(name: str, min_order: int, needs: str) -> _Node:
    return _Node(name, min_order, needs, ir._WaitKernel.__new__(ir._WaitKernel))


def _ordered(*nodes: _Node) -> str:
    order: Any = KeepWaits()
    return " ".join(node.name for node in order(list(nodes)))


def test_fused_kernel_moves_after_wait_that_it_needs() -> None:
    # Original order: embedding, launch b, wait a, norm. The norm is fused with the embedding.
    launch_a, launch_b = _Node("launch_a", 0), _Node("launch_b", 2)
    wait_a, kernel = _wait("wait_a", 3, "launch_a"), _Node("kernel", 1, "wait_a kernel")
    ours = _ordered(launch_a, wait_a, kernel, launch_b, _Node("product", 5, "kernel"))
    assert ours == "launch_a launch_b wait_a kernel product"


def test_nodes_that_need_no_later_wait_keep_their_place() -> None:
    nodes = [_Node("a", 0), _Node("launch", 1, "a"), _Node("b", 2, "a elsewhere"), _Node("c", 3)]
    assert _ordered(*nodes, _wait("wait", 4, "launch")) == "a launch b c wait"


@dataclass(eq=False)
class _Fused(_Node):
    snodes: list[_Node] = field(default_factory=list)
    scheduler: Any = field(default_factory=lambda: SimpleNamespace(name_to_fused_node={}))

    def get_buffer_names(self) -> list[str]:
        return [node.name for node in self.snodes]


def test_kernel_is_split_if_launch_before_its_wait_needs_it() -> None:
    # Original order: grad, launch grad, wait a, norm. Grad and norm are fused.
    launch_a, wait_a = _Node("launch_a", 0), _wait("wait_a", 4, "launch_a")
    grad, norm = _Node("grad", 1), _Node("norm", 5, "wait_a")
    launch = _Node("launch", 3, "packed", ir._CollectiveKernel.__new__(ir._CollectiveKernel))
    kernel = _Fused("kernel", 1, "wait_a", snodes=[grad, norm])
    nodes = [launch_a, wait_a, kernel, _Node("packed", 2, "grad"), launch]
    assert _ordered(*nodes) == "launch_a grad packed launch wait_a norm"
    assert kernel.scheduler.name_to_fused_node == {"grad": grad, "norm": norm}


def test_kernel_is_not_split_if_no_launch_before_its_wait_needs_it() -> None:
    launch_a, wait_a = _Node("launch_a", 0), _wait("wait_a", 4, "launch_a")
    kernel = _Fused("kernel", 1, "wait_a", snodes=[_Node("grad", 1), _Node("norm", 5, "wait_a")])
    launch = _Node("launch", 6, "grad", ir._CollectiveKernel.__new__(ir._CollectiveKernel))
    assert _ordered(launch_a, wait_a, kernel, launch) == "launch_a wait_a kernel launch"


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (1 << 30, "launch_a cast launch wait_a zeros sum"),
        (1 << 10, "launch_a zeros kernel launch wait_a"),
    ],
)
def test_large_allocation_stays_after_preceding_wait(num_bytes: int, expected: str) -> None:
    # Original order: cast, launch cast, wait a, zeros, sum. Cast and sum are fused.
    launch_a, wait_a = _Node("launch_a", 0), _wait("wait_a", 4, "launch_a")
    cast, zeros = _Node("cast", 1), _Node("zeros", 5, num_bytes=num_bytes)
    launch = _Node("launch", 3, "cast", ir._CollectiveKernel.__new__(ir._CollectiveKernel))
    kernel = _Fused("kernel", 1, "zeros", snodes=[cast, _Node("sum", 6, "zeros")])
    assert _ordered(launch_a, zeros, kernel, launch, wait_a) == expected


@pytest.mark.parametrize(("name", "off"), KEEP_ORDER.items())
def test_options_that_reorder_kernels_are_dropped_with_warning(name: str, off: object) -> None:
    on = "all" if off == "none" else True
    with pytest.warns(UserWarning, match=f"without {name}={on!r}, .*planned places"):
        assert with_planned_order({name: on, "max_autotune": True}) == {"max_autotune": True}


def test_other_options_are_kept_without_warning(recwarn: pytest.WarningsRecorder) -> None:
    asked = {"max_fusion_size": 2}
    assert with_planned_order({**asked, "combo_kernels": False}) == asked and not recwarn
