"""``python -m graphshard check``: its report on a user's script."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from graphshard.__main__ import main
from graphshard.check import cli
from graphshard.check.process import CheckError, call
from graphshard.check.report import Report, Target, check
from graphshard.failures import Failure, describe_failure
from tests.cuda.test_cases import skip_without_stand_ins

pytestmark = [skip_without_stand_ins, pytest.mark.timeout(300)]

SCRIPT = """
import os
import sys
import time
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import triton
import triton.language as tl
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

def make_model(rows=64):
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    return model, (torch.randn(rows, 1024),), options

def too_large():
    return make_model(rows=2**25)

def reads_a_value():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.sum().item()
    return Model(16, 16), (torch.randn(4, 16),)

def copies_to_the_host():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum().cpu() * torch.ones((), device="cpu")
    return Model(16, 16), (torch.randn(4, 16),)

class ToHost(nn.Linear):
    def forward(self, x):
        value = super().forward(x).sum().to("cpu", non_blocking=True)
        self.wait(x)
        return value * torch.ones((), device="cpu")

    def wait(self, x):
        pass

def copies_in_a_graph():
    return ToHost(16, 16), (torch.randn(4, 16),)

def waits_in_a_graph():
    class Model(ToHost):
        def wait(self, x):
            torch.cuda.synchronize()
    return Model(16, 16), (torch.randn(4, 16),)

class Logs(nn.Linear):
    def forward(self, x):
        self.log(x)
        return super().forward(x).sum()

    @torch.compiler.disable
    def log(self, x):
        mean = funcol.wait_tensor(funcol.all_reduce(x, "avg", dist.group.WORLD))
        value = mean.to("cpu", non_blocking=True)
        self.wait()
        value * 2

    def wait(self):
        pass

def reads_too_early():
    return Logs(16, 16), (torch.randn(4, 16),)

def waits_between_graphs():
    class Model(Logs):
        def wait(self):
            torch.cuda.current_stream().synchronize()
    return Model(16, 16), (torch.randn(4, 16),)

def waits_between_layers():
    class Model(nn.Sequential):
        def forward(self, x):
            for number, layer in enumerate(self):
                x = layer(x).relu()
                if number == 2:
                    torch.cuda.synchronize()
            return x.sum()
    return Model(*[nn.Linear(512, 512) for _ in range(4)]), (torch.randn(8, 512),)

@triton.jit
def double(x, out, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out + i, 2 * tl.load(x + i))

def calls_own_kernel():
    class Model(nn.Linear):
        def forward(self, x):
            scale = torch.empty_like(x[0])
            double[(1,)](x[0].contiguous(), scale, 16)
            return super().forward(x * scale).sum()
    return Model(16, 16), (torch.randn(4, 16),)

def makes_a_constant():
    class Model(nn.Linear):
        def forward(self, x):
            keys = torch.tensor([], device=x.device)  # a cache that is empty yet
            return torch.cat([keys, super().forward(x).flatten()])
    return Model(16, 16), (torch.randn(4, 16),)

def sums_large_gradients():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            # Inductor pads rows of more than 1024 elements.
            self.params = nn.ParameterList(torch.zeros(8192, 4100) for _ in range(6))
        def forward(self, x):
            for p in self.params:
                x = (x + p).sin()
            return x.sum()
    return Model(), (torch.zeros(8192, 4100),), {"overrides": {"*": {"shard": False}}}

def sums_complex_gradients():
    class Model(nn.Module):  # layers of a Fourier Neural Operator
        def __init__(self):
            super().__init__()
            weights = [torch.randn(64, 64, 32, 32, dtype=torch.cfloat) for _ in range(6)]
            self.weights = nn.ParameterList(weights)
        def forward(self, x):
            for w in self.weights:
                modes = torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(x)[:, :, :32, :32], w)
                x = torch.fft.irfft2(modes, s=x.shape[-2:])
            return x.sum()
    return Model(), (torch.randn(4, 64, 128, 128),)

def sends_columns():
    class Model(Logs):
        def log(self, x):
            torch.ops._c10d_functional.all_reduce_(x[:, :8], "sum", dist.group.WORLD.group_name)
        log = torch.compiler.disable(log)
    return Model(16, 16), (torch.randn(4, 16),)

def breaks():
    class Model(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            torch._dynamo.graph_break()
            return self[1](x).square().mean()
    return Model(nn.Linear(2048, 1024), nn.Linear(1024, 4096)), (torch.randn(65536, 2048),)

def takes_some_rows():
    class Model(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return x[x > 0].sum()
    return Model(16, 16), (torch.randn(4, 16),)

def branches_in_a_graph():
    class Model(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return x * 2 if x.sum().item() > 0 else x
    torch._dynamo.config.capture_scalar_outputs = True
    return Model(16, 16), (torch.randn(4, 16),)

def attention_has_a_learned_bias():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    class Attention(nn.Linear):
        def __init__(self):
            super().__init__(256, 768)
            self.slopes = nn.Parameter(torch.ones(4))
        def forward(self, x):
            query, key, value = super().forward(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 512, 512, x.device)
            biased = lambda score, b, h, i, j: score + self.slopes[h] * (i - j)
            x = flex_attention(query, key, value, score_mod=biased, block_mask=mask)
            return x.transpose(1, 2).flatten(2)
    model = nn.Sequential(Attention(), nn.Linear(256, 16))
    return model, (torch.randn(2, 512, 256),), {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}

def experts():
    from transformers import MixtralConfig, MixtralForCausalLM
    config = MixtralConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
    )
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    return MixtralForCausalLM(config), {"input_ids": tokens, "labels": tokens}, options

def inputs_are_elsewhere():
    from library import Library
    return Library(16, 16), (torch.randn(4, 16, device="cpu"),)

def nothing_is_trained():
    return nn.Linear(16, 16).requires_grad_(False), (torch.randn(4, 16),)

def returns_nothing():
    class Model(nn.Linear):
        def forward(self, x):
            return None
    return Model(16, 16), (torch.randn(4, 16),)

def no_model():
    return 3

def shapes_do_not_fit():
    class Model(nn.Linear):
        def forward(self, x):
            return super().forward(x) @ x
    return Model(16, 16), (torch.randn(4, 16),)

def looks_at_type():
    class Model(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return y.relu() if type(self[0]) is nn.Linear else y.sigmoid()
    return Model(nn.Linear(16, 16)), (torch.randn(4, 16),)

def options_are_wrong():
    return *make_model()[:2], {"reshard_after_forward": 3}

def file_is_missing():
    open("no such file")

def leaves():
    sys.exit(0)

def dies():
    os._exit(0)

def hangs():
    time.sleep(100)

def wants_cuda_graphs():
    torch._inductor.config.triton.cudagraphs = True
    return make_model()
"""
LIBRARY = """
from torch import nn

class Library(nn.Linear):
    def forward(self, x):
        return super().forward(x)
"""


# Functions of the script, checked in one process since starting one takes seconds; and patterns in
# their reports.
AS_PLANNED = "order        as planned"
REPORTED: dict[str, tuple[str, ...]] = {
    "attention_has_a_learned_bias": ("all_gather +5 -> 1 ", AS_PLANNED),
    "calls_own_kernel": (),
    "copies_in_a_graph": ("waits 2 times, for aten.copy_.default\n",),  # Inductor adds a wait
    "copies_to_the_host": ("waits 2 times, for aten.copy_",),
    "experts": ("all_to_all", AS_PLANNED),
    "makes_a_constant": (),
    "reads_too_early": ("aten.mul.Tensor on stream host does not wait for aten._to_copy",),
    "sums_complex_gradients": ("reduce_scatter", AS_PLANNED),
    "sums_large_gradients": ("all_reduce", AS_PLANNED),
    "too_large": ("out of memory: a step needs",),
    "waits_between_graphs": ("waits 1 times, for synchronize_stream\n",),
    "waits_between_layers": ("waits 1 times, for synchronize_device\n",),
    "waits_in_a_graph": ("waits 3 times, for aten.copy_.default, synchronize_device\n",),
}
RUN = (*REPORTED, "breaks")
ERRORS = {
    "no_model": "ValueError: no_model returned int: must be (model, inputs)",
    "reads_a_value": "the model reads a value of a tensor (aten._local_scalar_dense.default)",
    "branches_in_a_graph": "the model reads a value of a tensor (aten._local_scalar_dense",
    "takes_some_rows": "the size of a tensor depends on values (aten.nonzero.default)",
    "inputs_are_elsewhere": "found at least two devices, cpu and cuda:0",
    "nothing_is_trained": "the loss depends on no parameter that requires a gradient",
    "returns_nothing": "the model's output, of type NoneType, has no tensor",
    "nothing": "has no function 'nothing': choose one of ",
    "sends_columns": "of shape [4, 8] has strides [16, 1], but NCCL requires dense tensors",
    "shapes_do_not_fit": "RuntimeError: a and b must have same reduction dim",
    "looks_at_type": "calls sigmoid where the plain model calls relu",
    "options_are_wrong": "ValueError: reshard_after_forward",
    "file_is_missing": "FileNotFoundError: [Errno 2] No such file or directory",
    "leaves": "the script ended the process: sys.exit(0)",
}


def check_all(recorder: Any, script: str) -> dict[str, Report | Failure]:
    found: dict[str, Report | Failure] = {}
    for function in (*RUN, *ERRORS):
        checks = mock.patch.dict(os.environ, {"GRAPHSHARD_CHECK": str(int(function in ERRORS))})
        # branches_in_a_graph enables capture_scalar_outputs.
        with checks, torch._dynamo.config.patch(capture_scalar_outputs=False):
            try:
                ep = 2 if function == "experts" else 1
                found[function] = check(recorder, Target(script, function, "H100", 8, ep=ep))
            except (Exception, SystemExit) as error:
                assert error.__traceback__ is not None
                inner = error.__traceback__.tb_next  # drops the frame of this function
                found[function] = describe_failure(error.with_traceback(inner))
    return found


@functools.cache
def _found(script: str) -> dict[str, Report | Failure]:
    found: dict[str, Report | Failure] = call("tests.cuda.test_command:check_all", "H100", script)
    return found


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("scripts")
    library = folder / "site-packages" / "library.py"  # counts as an installed package
    library.parent.mkdir()
    library.write_text(LIBRARY)
    path = folder / "script.py"
    path.write_text(f"import sys\nsys.path.append({str(library.parent)!r})\n{SCRIPT}")
    return str(path)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(function: str, device: str, target: Target, timeout_s: float) -> Report:
        assert (device, target.world, target.replicas, target.rank) == ("H100", 8, 1, 0)
        found = _found(target.script)[target.function]
        if isinstance(found, Failure):
            raise CheckError(found)
        return found

    monkeypatch.setattr(cli, "call", answer)


in_one_process = pytest.mark.usefixtures("one_process")


def test_report_on_valid_model_has_no_errors(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "A100-40GB", "--world", "64", "--replicas", "2"]
    assert main(["check", f"{script}:wants_cuda_graphs", *options]) == 0
    text, warnings = capsys.readouterr()
    assert "graphs that graphshard compiles run without CUDA graphs" in warnings
    assert "errors       none" in text and "rank 0 of 64" in text and "A100-40GB" in text
    assert "forward alone needs" in text and "backward alone needs" in text
    step, adam = map(
        float, re.findall(r"needs (\S+) GB with SGD and momentum, (\S+) with", text)[0]
    )
    assert 0 < step <= adam
    assert "order        as planned" in text and "reduce_scatter" in text


@in_one_process
@pytest.mark.parametrize(("function", "patterns"), REPORTED.items())
def test_report_matches_patterns(
    script: str, capsys: pytest.CaptureFixture[str], function: str, patterns: tuple[str, ...]
) -> None:
    options = ["--ep", "2"] if function == "experts" else []
    status = main(["check", f"{script}:{function}", *options])
    text = capsys.readouterr().out
    assert all(re.search(pattern, text) for pattern in patterns), text
    fails = function in ("reads_too_early", "too_large")
    assert status == fails and ("errors       none" in text) != fails, text


@in_one_process
def test_each_of_two_graphs_is_compared_with_its_plan(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{script}:breaks"]) == 0
    text = capsys.readouterr().out
    found = re.findall(r"(\w+(?: \d)?) alone needs (\S+) GB \(planned (\S+)\)", text)
    assert [graph for graph, *_ in found] == ["forward", "forward 2", "backward", "backward 2"]
    step = re.search(r"a step needs (\S+) GB", text)
    assert step and float(step[1]) > max(float(needed) for _, needed, _ in found)
    for _, needed, planned in found:
        assert float(needed) == pytest.approx(float(planned), rel=0.02, abs=0.01)


@in_one_process
@pytest.mark.parametrize(("function", "error"), ERRORS.items())
def test_error_of_failing_script_is_reported(
    script: str, capsys: pytest.CaptureFixture[str], function: str, error: str
) -> None:
    assert main(["check", f"{script}:{function}"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("error  ") and error in text.splitlines()[0], text
    assert "TORCHDYNAMO_VERBOSE" not in text and "Traceback" not in text
    lines = {
        "shapes_do_not_fit": "return super().forward(x) @ x",
        "file_is_missing": 'open("no such file")',
        "leaves": "sys.exit(0)",
        "branches_in_a_graph": "def forward(self, x):",  # instead of a line of generated code
        "takes_some_rows": "return x[x > 0].sum()",
        "inputs_are_elsewhere": "return super().forward(x)",
    }
    if function in lines:
        file = ".*/library.py" if function == "inputs_are_elsewhere" else script
        assert re.search(rf"^at +{file}:\d+: {re.escape(lines[function])}$", text, re.MULTILINE)


def test_script_with_syntax_error_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("def f(:\n")
    assert main(["check", f"{script}:f", "--verbose"]) == 1
    text = capsys.readouterr().out
    assert "error  SyntaxError: invalid syntax" in text and "Traceback" in text
    assert f"{script}:1: def f(:" in text


def test_script_that_ends_its_process_is_reported(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{script}:dies"]) == 1
    assert "error  the process ended with exit status 0" in capsys.readouterr().out


def test_script_that_hangs_is_stopped(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{script}:hangs", "--timeout", "2"]) == 1
    assert "error  the check did not finish within 2 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["script.py"], "'script.py': must be SCRIPT:FUNCTION"),
        (["a.py:f", "--device", "H1"], "--device H1: must be one of H100, H200"),
        (["a.py:f", "--world", "6", "--replicas", "4"], "x tp must divide the world size"),
        (["a.py:f", "--world", "6", "--tp", "4"], "x tp must divide the world size"),
        (["a.py:f", "--tp-plan", "a.py:g"], "--tp-plan a.py:g: needs --tp of at least 2"),
        (["a.py:f", "--rank", "8"], "--rank 8: must be from 0 to 7"),
        (["nosuch.py:f"], "nosuch.py: must be an existing Python file"),
        (["a.py:f", "--timeout", "nan"], "'nan': must be a positive number of seconds"),
        (["a.py:f", "--timeout", "inf"], "'inf': must be a positive number of seconds"),
    ],
)
def test_bad_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], error: str
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["check", *arguments])
    assert exited.value.code == 2
    assert error in capsys.readouterr().err
