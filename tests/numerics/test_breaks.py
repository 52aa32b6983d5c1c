from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.models import MLP, Trainable
from tests.numerics.compare import Twins, assert_close, draw, graphshard_warnings, world_mesh
from tests.ranks import on_ranks

DIM = 7


class _Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(DIM))
        self.last = nn.Linear(DIM, 3)

    batch = staticmethod(MLP.batch)


class Middle(_Broken):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.gain
        torch._dynamo.graph_break()
        return (self.last(x * self.gain)).square().mean()


class Loop(_Broken):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.gain
        for layer in self.layers:
            x = torch.relu(layer(x))
            torch._dynamo.graph_break()
        return self.last(x * self.gain).square().mean()


class DisabledFirst(_Broken):
    @torch.compiler.disable
    def prepare(self, x: Tensor) -> Tensor:
        return self.first(x) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        x = self.prepare(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(self.prepare(x)).square().mean()


class DisabledLast(_Broken):
    @torch.compiler.disable
    def finish(self, x: Tensor) -> Tensor:
        return self.last(x * self.gain).square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(torch.relu(self.first(x)) @ self.layers[0].weight)


@torch.compiler.disable(recursive=False)
def _skipped(model: Any, x: Tensor) -> Tensor:
    x = F.linear(x, model.first.weight) * model.gain
    for layer in model.layers:
        x = torch.relu(layer(x))
    return (model.last(x) * model.gain[:3]).square().mean()


class SkippedRoot(_Broken):
    """Model whose forward calls a function that Dynamo skips; only its callees are compiled."""

    def forward(self, x: Tensor) -> Tensor:
        return _skipped(self, x)


class DataDependent(_Broken):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > 0:
            x = self.layers[0](x)
        else:
            x = self.layers[1](x)
        return self.last(x * float(x.detach().abs().max().item() > 0)).square().mean()


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.shift = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return torch.tanh(x + self.shift)


class InChild(_Broken):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(_Inner(), nn.Linear(DIM, DIM), _Inner())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x))).square().mean()


class Held(_Broken):
    """Model that uses a parameter in a local variable, and a tied one, on both sides of a break."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        scaled = self.gain * 2
        x = F.linear(x, weight)
        torch._dynamo.graph_break()
        x = F.linear(torch.tanh(x) * scaled, weight) + self.layers[0](x)
        return self.last(x).square().mean()


class InNoGrad(_Broken):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layers[0](x)
            torch._dynamo.graph_break()
            target = self.layers[1](target)
        return F.mse_loss(self.first(x), target) + self.last(x).square().mean()


class InCheckpoint(_Broken):
    def part(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.layers[0](x) * self.gain

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.part, x, use_reentrant=False)).square().mean()


class Printing(_Broken):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        assert _look(self.gain) == DIM
        return self.last(x * self.gain).square().mean()


@torch.compiler.disable
def _look(param: Tensor) -> int:
    assert param.shape == (DIM,)
    return int(torch.count_nonzero(param.detach() < 1e9))


class WithUnused(_Broken):
    @torch.compiler.disable
    def eager(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.layers[2](x)
        return self.first(x) + shift

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.eager(x)).square().mean()


BROKEN = [
    Middle,
    Loop,
    DisabledFirst,
    DisabledLast,
    SkippedRoot,
    DataDependent,
    InChild,
    InNoGrad,
    InCheckpoint,
    Printing,
    WithUnused,
]


@pytest.mark.parametrize(
    ("kind", "compiler"),
    [*((kind, "aot_eager") for kind in BROKEN), (Held, "inductor")],
)
@on_ranks(2)
def test_model_with_graph_breaks_trains(kind: Trainable, compiler: str) -> None:
    with graphshard_warnings() as warned:
        twins = Twins(kind(), fullgraph=False, compiler=compiler)
        twins.train(kind.batch)
        assert torch.is_grad_enabled()
        if compiler != "inductor":
            with torch.no_grad():
                twins.compiled(torch.ones(5, DIM))
    assert len(warned) == 1, warned
    name = kind.__name__  # type: ignore[attr-defined]
    assert warned[0].startswith(f"graphshard: {name} does not compile to one graph:")
    if kind is Middle:
        line = Middle.forward.__code__.co_firstlineno + 2
        assert f"test_breaks.py:{line}" in warned[0]


@on_ranks(2)
def test_replicated_model_with_graph_breaks_evaluates() -> None:
    twins = Twins(Middle(), fullgraph=False, overrides={"*": {"shard": False}})
    x = torch.ones(5, DIM)
    with graphshard_warnings(), torch.no_grad():
        assert_close("loss", twins.compiled(x), twins.reference(x))


@torch.compiler.disable
def _clamp(param: Tensor) -> None:
    with torch.no_grad():
        param.clamp_(-0.1, 0.1)


class Clamping(_Broken):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        x = F.linear(x, weight)
        _clamp(weight)
        return self.last(x).square().mean()


@pytest.mark.parametrize("is_frozen", [False, True])
@on_ranks(2)
def test_eager_part_that_changes_a_given_parameter_raises(is_frozen: bool) -> None:
    model = Clamping()
    model.first.weight.requires_grad_(not is_frozen)
    compiled = torch.compile(model, backend=graphshard.backend(compiler="aot_eager"))
    with pytest.raises(RuntimeError, match=r"parameter 'first\.weight' in place"):
        compiled(torch.ones(3, DIM)).backward()


# Functions with graph breaks, which may call the model before graphshard sees its parameters.


def _break_between_parts(model: Any) -> Callable[[Tensor], Tensor]:
    def loss(x: Tensor) -> Tensor:
        x = torch.tanh(model.first(x))
        torch._dynamo.graph_break()
        return model.last(x * model.gain).square().mean()

    return loss


def _eager_before(model: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that first uses the model eagerly.

    Autograd's graph then already holds full parameters when the model is sharded.
    """
    eager = torch.compiler.disable(lambda x: model.first(x))

    def loss(x: Tensor) -> Tensor:
        x = eager(x)
        for layer in model.layers:
            x = torch.relu(layer(x))
        return model.last(x * model.gain).square().mean()

    return loss


def _eager_read(model: Any) -> Callable[[Tensor], Tensor]:
    eager = torch.compiler.disable(lambda x: x * model.gain)

    def loss(x: Tensor) -> Tensor:
        return model.last(eager(model.first(x))).square().mean()

    return loss


def _whole_model_before(model: Any) -> Callable[[Tensor], Tensor]:
    eager = torch.compiler.disable(model.forward)

    def loss(x: Tensor) -> Tensor:
        return eager(x) + model(x * 2)

    return loss


def _other_method(model: Any) -> Callable[[Tensor], Tensor]:
    return model.training_step


class WithTrainingStep(_Broken):
    @torch.compiler.disable
    def scale(self, x: Tensor) -> Tensor:
        return x * self.gain

    def training_step(self, x: Tensor) -> Tensor:
        return self.last(self.scale(self.first(x))).square().mean()


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (_break_between_parts, Middle),
        (_eager_before, Middle),
        (_eager_read, Middle),
        (_whole_model_before, MLP),
        (_other_method, WithTrainingStep),
    ],
)
@on_ranks(2)
def test_function_with_graph_breaks_trains(
    function: Callable[[nn.Module], Any], kind: Trainable
) -> None:
    twins = Twins(kind(), function=function, fullgraph=False)
    twins.train(kind.batch)


@pytest.mark.parametrize("kind", [MLP, DisabledFirst])
@on_ranks(2)
def test_backward_in_compiled_function_runs_our_code_in_python(kind: Trainable) -> None:
    def with_backward(model: nn.Module) -> Callable[[Tensor], None]:
        params = list(model.parameters())
        return lambda x: model(x).backward(inputs=params)

    plain = kind()
    model = graphshard.shard(copy.deepcopy(plain), world_mesh())
    twins = Twins(model, plain, function=with_backward, fullgraph=False)
    clear_compilation_metrics()
    for step in range(4):  # the third is timed
        batches = draw(kind.batch, step)
        with graphshard_warnings():
            twins.compiled(batches[dist.get_rank()])
        torch.stack([twins.reference(batch) for batch in batches]).mean().backward()
        twins.check()
    files = {str(metrics.co_filename) for metrics in get_compilation_metrics()}
    ours = str(Path(graphshard.__file__).parent)
    assert files and not [file for file in files if file.startswith(ours)]


def _zeroed(model: Any) -> None:
    model.zero_grad()


def _set_to_none(model: Any) -> None:
    for param in model.parameters():
        param.grad = None
    assert model.up.weight.grad is None


@pytest.mark.parametrize("forget", [_zeroed, _set_to_none])
@on_ranks(2)
def test_compiled_function_forgets_gradients(forget: Callable[[nn.Module], None]) -> None:
    def step(model: nn.Module) -> Callable[[Tensor], None]:
        def run(x: Tensor) -> None:
            forget(model)
            model.up.weight.last = "used"  # type: ignore[union-attr]
            model(x).backward()

        return run

    twins = Twins(MLP(), function=step, fullgraph=False)
    for number in range(3):
        batches = draw(MLP.batch, number)
        with graphshard_warnings():
            twins.compiled(batches[dist.get_rank()])
        twins.reference.zero_grad()
        torch.stack([twins.reference(batch) for batch in batches]).mean().backward()
        twins.check()
    assert twins.model.up.weight.last == "used"


class Debugged(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        breakpoint()
        return self.down(self.mid(x)).square().mean()


_stops: list[tuple[str, tuple[int, ...], Tensor]] = []


def stop() -> None:
    """Stand in for a debugger: record the caller's state."""
    caller = sys._getframe(1)
    model, x = caller.f_locals["self"], caller.f_locals["x"]
    _stops.append((caller.f_code.co_name, tuple(x.shape), model.up.weight.detach().clone()))


@on_ranks(2, env={"PYTHONBREAKPOINT": f"{__name__}.stop"})
def test_breakpoint_stops_in_forward() -> None:
    twins, batch = Twins(Debugged(), fullgraph=False), draw(MLP.batch, 0)
    twins.backward(batch)
    twins.check()
    torch.compile(twins.reference, backend="aot_eager")(batch[dist.get_rank()])
    (*ours, weight), (*theirs, full) = _stops[0], _stops[-1]
    assert ours == theirs
    assert torch.equal(weight, full)
