"""CPU kernels compile in few files, and forward's kernels compile while backward is lowered."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import async_compile
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard._torch import cpp_kernels
from graphshard._torch.cpp_kernels import few_cpp_files
from graphshard.pipeline import compile as pipeline
from tests.graph.conftest import WORLD_SIZE

KERNEL = 'extern "C"  void  kernel(float* x)\n{\n    x[0] += NUMBER;\n}\n'
HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.table = nn.Embedding(50, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer, function in zip(self.layers, (torch.tanh, torch.erf, torch.relu)):
            x = x + function(layer(nn.functional.layer_norm(x, (24,))))
        return nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten() % 24)


def _train(folder: Path) -> list[Tensor]:
    # A mesh of one rank: no fake collectives, so results are real.
    mesh = init_device_mesh("cpu", (WORLD_SIZE, 1), mesh_dim_names=("others", "own"))["own"]
    torch._dynamo.reset()
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    model, ids = Deep(), torch.randint(0, 50, (6, 16))
    compiled = torch.compile(model, backend=graphshard.backend(mesh), fullgraph=True)
    with fresh_cache(dir=str(folder), delete=False):
        loss = compiled(ids)
        loss.backward()
    return [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())]


def _sources(folder: Path) -> list[str]:
    return [path.read_text() for path in folder.rglob("*.main.cpp")]


def _kernels(source: str) -> int:
    return len(re.findall(r"void\s+kernel\(", source))


@dataclass(frozen=True)
class Shared:
    """A training step with kernels in shared files.

    Attributes:
        numbers: loss and gradients.
        sources: source code of each file.
        events: "lower" for a lowered graph and "wait" for a wait for kernels, in order.
    """

    numbers: list[Tensor]
    sources: list[str]
    events: list[str]


@pytest.fixture(scope="module")
def shared(_group: None, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    events: list[str] = []
    lower, wait = pipeline.Lowering.__call__, async_compile.AsyncCompile.wait

    def noted_lower(self: Any, graph: Any) -> None:
        events.append("lower")
        lower(self, graph)

    def noted_wait(self: Any, scope: dict[str, Any]) -> None:
        events.append("wait")
        wait(self, scope)

    folder = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch(compile_threads=2):
        patch.setattr(pipeline.Lowering, "__call__", noted_lower)
        patch.setattr(async_compile.AsyncCompile, "wait", noted_wait)
        return Shared(_train(folder), _sources(folder), events)


def test_backward_is_lowered_before_kernels_are_waited_for(shared: Shared) -> None:
    assert shared.events == ["lower", "lower", "wait", "wait"]


def test_kernels_share_files_and_compile_alone_if_one_is_broken(
    shared: Shared, mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_kernels, "_in_namespaces", lambda modules: "#error broken")
    with inductor_config.patch(compile_threads=2):
        torch.testing.assert_close(_train(tmp_path), shared.numbers, rtol=0, atol=0)
    broken, *apart = sorted(map(_kernels, _sources(tmp_path)))
    assert broken == 0 and set(filter(None, apart)) == {1} and sum(apart) > 6
    counts = sorted(map(_kernels, shared.sources))
    assert len(counts) == 3  # two for backward; one for forward, to leave a core for lowering
    assert sum(counts) >= sum(apart)
    assert counts[0] > 1


def _run(sources: list[str], folder: Path, threads: int = 2) -> tuple[list[float], int]:
    """Compile kernels as one graph; return each result for input 0, and the number of files."""
    with inductor_config.patch(compile_threads=threads), fresh_cache(dir=str(folder), delete=False):
        with few_cpp_files(1):
            compiler = async_compile.AsyncCompile()
            scope = {f"k{i}": compiler.cpp_pybinding(["float*"], s) for i, s in enumerate(sources)}
            compiler.wait(scope)
        values = [torch.zeros(1) for _ in sources]
        for kernel, value in zip(scope.values(), values):
            kernel(value)
    return [value.item() for value in values], len(_sources(folder))


def _kernel(number: int, before: str = "") -> str:
    return HEADER + before + KERNEL.replace("NUMBER", f"{number}.0f")


@pytest.mark.parametrize(
    ("before", "num_files"),
    [
        ("", 2),
        ("static float helper(float x) { return x; }\n", 2),
        ("struct Tile { int n; };\ntemplate <bool b> inline int tile() { return b; }\n", 2),
        ("#define TILE 4\n", 3),
        ('extern "C" int other() { return 1; }\n', 3),
    ],
    ids=["plain", "function", "types", "macro", "exported"],
)
def test_kernels_in_one_file_do_not_clash(before: str, num_files: int, tmp_path: Path) -> None:
    sources = [_kernel(number, before) for number in range(3)]
    assert _run(sources, tmp_path) == ([0.0, 1.0, 2.0], num_files)


def test_each_kernel_has_its_own_file_with_one_thread(tmp_path: Path) -> None:
    assert _run([_kernel(number) for number in range(3)], tmp_path, 1)[1] == 3


def test_graph_may_have_equal_kernels(tmp_path: Path) -> None:
    assert _run([_kernel(1), _kernel(1), _kernel(2)], tmp_path)[0] == [1.0, 1.0, 2.0]


def test_graph_without_kernels_waits_for_nothing(tmp_path: Path) -> None:
    assert _run([], tmp_path) == ([], 0)


def test_error_shows_only_code_of_its_kernel(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="C\\+\\+ compile error") as raised:
        _run([_kernel(1), HEADER + 'extern "C" void kernel(float* x) { y; }'], tmp_path)
    assert "namespace graphshard" not in Path(raised.value.cmd[1]).read_text()  # type: ignore[attr-defined]


def test_other_threads_are_not_affected(tmp_path: Path) -> None:
    def sine() -> Tensor:
        return torch.compile(torch.sin, backend="inductor")(torch.ones(8))

    cache = fresh_cache(dir=str(tmp_path), delete=False)
    with cache, few_cpp_files(1), ThreadPoolExecutor(1) as other:
        result = other.submit(sine).result()
    torch.testing.assert_close(result, torch.ones(8).sin())


def test_error_restores_inductor() -> None:
    before = async_compile.AsyncCompile
    with pytest.raises(RuntimeError, match="in the middle"), few_cpp_files(1):
        async_compile.AsyncCompile().wait({})
        raise RuntimeError("in the middle")
    assert async_compile.AsyncCompile is before
    assert not hasattr(cpp_kernels._thread, "put_off")
