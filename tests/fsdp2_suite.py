"""Run FSDP2's own tests with graphshard in place of `fully_shard`, on gloo ranks.

    python -m tests.fsdp2_suite --torch CHECKOUT [--ranks 4] [--only NAME] [FILE ...]

CHECKOUT is a working copy of PyTorch at the installed version; its test helpers need `expecttest`.
Every call of `fully_shard` shards its module with `graphshard.shard` and compiles it with
`compiler="aot_eager"`. Counts of collectives (here the planner chooses buckets), calls of FSDP2's
own functions, and streams are not compared. Prints one row per test.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import re
import sys
import types
import unittest
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import fsdp2_shim as shim
from . import ranks

FOLDER = Path("test/distributed/_composable/fsdp")
NAMES = ["training", "autograd", "frozen", "clip_grad_norm_", "mixed_precision"]
NAMES += ["ignore_params", "state_dict"]
TIMEOUT_S = 400.0
# Replacements in the tests, which use a GPU even if they need none. Line numbers stay the same.
TO_CPU = [('"cuda"', '"cpu"'), (".cuda()", ".cpu()"), ("torch.cuda.device", "torch.cpu.device")]
TO_CPU += [("torch.get_device_module(device_type).current_device()", "None")]


class AnyCounts(defaultdict[object, shim.Anything]):
    """Collective counts that equal any expected counts; `len` is 1."""

    def __init__(self) -> None:
        super().__init__(shim.Anything)

    def __len__(self) -> int:
        return 1


class CommDebugMode(contextlib.nullcontext[Any]):
    """Stand-in that counts nothing: under torch's CommDebugMode, Dynamo does not compile."""

    def __init__(self) -> None:
        super().__init__(self)

    def get_comm_counts(self) -> Mapping[object, shim.Anything]:
        return AnyCounts()


def _run_subtests(
    case: object, config: Mapping[str, Sequence[Any]], fn: Callable[..., None], *args: Any
) -> None:
    """Run `fn` with all combinations of `config`; note those that graphshard does not support."""
    for values in itertools.product(*config.values()):
        chosen = dict(zip(config, values))
        torch._dynamo.reset()
        shim.sharded.clear()
        try:
            fn(*args, **chosen)
        except shim.NoCounterpartError as error:
            shim.notes.append(f"without {error}")
        except BaseException as error:
            error.add_note(f"subtest: {chosen}")
            raise
        dist.barrier()


@contextlib.contextmanager
def _count_enough(fn: Callable[[], object]) -> Iterator[None]:
    """Call `fn`, which counts FSDP2's backward hooks, more often than any test expects."""
    for _ in range(100):
        fn()
    yield


Replacements = list[tuple[Any, dict[str, Any]]]


def _for_graphshard() -> Replacements:
    import torch.distributed.tensor.debug as debug
    import torch.testing._internal.common_fsdp as common_fsdp
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return [
        (dist.fsdp, {"fully_shard": shim.fully_shard, "FSDPModule": shim.FSDPModule}),
        (dist.fsdp, {"register_fsdp_forward_method": lambda *_: None}),
        (debug, {"CommDebugMode": CommDebugMode}),
        (common_fsdp, {"fully_shard": shim.fully_shard}),
        (common_fsdp, {"patch_register_post_backward_hook_backward": _count_enough}),
        (_fsdp_param_group.RegisterPostBackwardFunction, {"backward": lambda *_: None}),
    ]


def _for_ranks() -> Replacements:
    import torch.distributed._composable as composable
    import torch.testing._internal.common_cuda as common_cuda
    import torch.testing._internal.common_device_type as common_device_type
    import torch.testing._internal.common_distributed as common_distributed
    import torch.testing._internal.common_fsdp as common_fsdp
    import torch.testing._internal.common_utils as common_utils
    from torch.testing._internal.distributed._tensor import common_dtensor

    class RankTest(common_utils.TestCase):
        rank = property(lambda self: dist.get_rank())
        world_size = property(lambda self: dist.get_world_size())
        process_group = property(lambda self: dist.group.WORLD)
        run_subtests = _run_subtests

        def perThreadSetUp(self) -> None:
            """Do nothing: ranks are processes here."""

    replicate = composable.replicate
    # DTensor does not shard a CPU's attention, so attention runs on local heads.
    parallelize = partial(common_dtensor.Transformer.parallelize, local_output_for_attn=True)
    return [
        (composable, {"replicate": lambda *args, device_ids=0, **kw: replicate(*args, **kw)}),
        (common_cuda, {"TEST_CUDA": True}),
        (common_device_type, {"instantiate_device_type_tests": lambda *_, **__: None}),
        (common_distributed, {"requires_nccl_version": lambda *_: _unchanged}),
        (common_distributed, {"skip_if_lt_x_gpu": _skip_if_lt_x_gpu}),
        (common_dtensor, {"DTensorContinuousTestBase": RankTest}),
        (common_dtensor.Transformer, {"parallelize": staticmethod(parallelize)}),
        (common_fsdp, {"FSDPTest": RankTest, "FSDPTestMultiThread": RankTest}),
        (common_fsdp, {"FSDPTestContinuous": RankTest}),
        (common_fsdp, {"compiled_fsdp_test": lambda **_: _unchanged}),
        (common_fsdp, {"DISTRIBUTED_BACKEND": "nccl"}),
        (common_utils, {"get_cycles_per_ms": lambda: 0.0}),
        (torch.cpu, {"device_count": dist.get_world_size}),
        (torch.cuda, {"_sleep": lambda _: None, "set_device": lambda _: None}),
        (torch.cuda, {"current_stream": lambda: types.SimpleNamespace(record_event=int)}),
    ]


def _unchanged(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _skip_if_lt_x_gpu(number: int, **_: Any) -> Any:
    return unittest.skipIf(dist.get_world_size() < number, f"needs {number} ranks")


@functools.cache
def _patch_torch(reference: bool) -> None:
    """Replace functions of torch for the rest of this process, before test modules import them.

    Args:
        reference: whether to keep FSDP2 itself.
    """
    if not reference:
        shim.add_methods()
    for owner, attributes in [*([] if reference else _for_graphshard()), *_for_ranks()]:
        for name, value in attributes.items():
            setattr(owner, name, value)


@functools.cache
def _load(path: Path, reference: bool) -> types.ModuleType:
    _patch_torch(reference)
    text = path.read_text()
    for gpu, cpu in TO_CPU:
        text = text.replace(gpu, cpu)
    module = sys.modules[path.stem] = types.ModuleType(path.stem)
    exec(compile(text, path, "exec"), module.__dict__)
    return module


def list_tests(path: Path, reference: bool) -> list[tuple[str, str]]:
    classes = [value for value in vars(_load(path, reference)).values() if isinstance(value, type)]
    own = [kind for kind in classes if kind.__module__ == path.stem]
    return [(kind.__name__, name) for kind in own for name in vars(kind) if name[:5] == "test_"]


def run_test(path: Path, reference: bool, kind: str, name: str, float64: bool) -> str:
    shim.sharded.clear()
    shim.notes.clear()
    shim.backends.clear()
    # Each fully_shard compiles the same function (`call` in fsdp2_shim) for a different module.
    torch._dynamo.config.recompile_limit = 64
    case = getattr(_load(path, reference), kind)(name)
    if float64:
        torch.set_default_dtype(torch.float64)
    try:
        if case.world_size != dist.get_world_size():
            raise unittest.SkipTest(f"needs {case.world_size} ranks")
        case.perThreadSetUp()
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except shim.NoCounterpartError as error:
        return f"no counterpart: {error}"
    if shim.notes and not shim.backends and not reference:  # no subtest ran
        return "no counterpart: " + shim.notes[0].removeprefix("without ")
    graphs = sum(len(backend.plans) for backend in shim.backends)
    return ", ".join([f"passes: {graphs} graphs", *sorted(set(shim.notes))])


def _cause(error: ranks.RankError) -> str:
    lines = error.failures[0].text.strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]*(Error|Unsupported)\b", line)]
    return (named or lines)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fsdp2_suite")
    parser.add_argument("--torch", type=Path, required=True, help="a checkout of PyTorch")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="run tests whose name contains this")
    parser.add_argument("--float64", action="store_true", help="rule out rounding errors")
    parser.add_argument("--reference", action="store_true", help="run the tests with FSDP2 itself")
    parser.add_argument(
        "files", nargs="*", default=[f"test_fully_shard_{name}.py" for name in NAMES]
    )
    args = parser.parse_args()
    for file in args.files:
        path = args.torch.resolve() / FOLDER / file
        for kind, name in ranks.run(args.ranks, list_tests, path, args.reference)[0]:
            if args.only not in name:
                continue
            test = (path, args.reference, kind, name, args.float64)
            try:
                result = ranks.run(args.ranks, run_test, *test, timeout_s=TIMEOUT_S)[0]
            except ranks.RankError as error:
                print(error, file=sys.stderr)
                result = "fails: " + _cause(error)
            print(f"| {path.stem} | {name} | {result} |", flush=True)


if __name__ == "__main__":
    main()
