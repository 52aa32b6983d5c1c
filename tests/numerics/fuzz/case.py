"""Random cases for the fuzz tests, as plain data.

A case has a model, graphshard's options, and a training loop. `draw(seed)` returns the same case on
every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from tests.numerics.fuzz.formulas import FORMULAS
from tests.numerics.fuzz.habits import HOOKS, TABLES, WRITES_OF_DATA
from tests.numerics.fuzz.modules import BREAKS, MODULES, SPLIT, WRAPPERS, WRITES

Block = tuple[Any, ...]
"""``(kind,)``, ``(kind, number)`` or ``(wrapper, block, ...)``."""

PRECISIONS = ("float64", "float32", "bf16", "bf16_reduced_in_float32", "autocast", "fp8")
EXACT = ("float64", "float32")
ENTRANCES = ("in_place", "function", "shard", "partial", "method", "own_forward")
FUNCTIONS = ("function", "partial", "method")
"""Entrances that make Dynamo compile a function."""


@dataclass(frozen=True)
class Case:
    """One random model and training loop. Defaults are the simplest values.

    Attributes:
        seed: seed of parameters and batches.
        blocks: blocks of the model, in order.
        dim: width of the activations.
        entry: kind of input: "floats", or "tokens", whose embedding is tied to the head.
        output: kind of result; "loss" is a scalar.
        frozen: whether each floating-point parameter of the blocks is frozen, repeated cyclically.
        mesh: sizes of the mesh axes: (shards,) or (replicas, shards).
        splits: number of tensor-parallel ranks for the blocks in `SPLIT`.
        reshard: ``reshard_after_forward``.
        overrides: (glob, option, value) triples; a glob that matches a block covers its parameters.
        ignored: indices of ``ignored_params``, among the floating-point parameters.
        precision: one of `PRECISIONS`.
        schedule: fields of ``SchedulePolicy`` and their values.
        offload: "shards" to keep shards on the host, or "".
        compiler: ``compiler`` of ``graphshard.backend``.
        entrance: kind of object to compile: "module"; "in_place" (``model.compile``); "function";
            "partial" (of the module); "method" (the bound forward); "shard" (a module that is
            sharded already); "own_forward" (a module whose forward is a ``functools.partial``).
        dynamic: ``dynamic`` of ``torch.compile``.
        sync: whether ranks start with different values, replaced by the first rank's.
        steps: number of optimizer steps.
        micros: number of microbatches per step.
        reduces_micros: whether every microbatch reduces its gradients; otherwise all but the last
            run under ``no_sync``.
        rows: variation of batch sizes: "same", "by_step", "by_rank" or "by_both".
        thaw: whether to unfreeze the blocks' floating-point parameters after the first step, except
            for the first parameter, which is frozen.
        evaluation: mode for evaluation between steps: "no_grad", "inference_mode" or "" (none).
        forwards: number of forwards per backward.
        optimizer: "sgd", "momentum" or "adamw".
        early: whether the optimizer is built before the first step.
        zeroes: whether to set gradients to zero instead of None between steps.
        hooks: names in `HOOKS`, registered before the model is compiled.
        writes: name in `WRITES_OF_DATA` of the change to all parameters between steps, or "".
        stale: whether to change parameters between the last forward and its backward.
        thread: whether to run forward and backward in a new thread.
    """

    seed: int
    blocks: tuple[Block, ...]
    dim: int = 4
    entry: str = "floats"
    output: str = "loss"
    frozen: tuple[bool, ...] = ()
    mesh: tuple[int, ...] = (2,)
    splits: int = 1
    reshard: bool | int = True
    overrides: tuple[tuple[str, str, Any], ...] = ()
    ignored: tuple[int, ...] = ()
    precision: str = "float64"
    schedule: tuple[tuple[str, Any], ...] = ()
    offload: str = ""
    compiler: str = "aot_eager"
    entrance: str = "module"
    dynamic: bool | None = None
    sync: bool = False
    steps: int = 2
    micros: int = 1
    reduces_micros: bool = False
    rows: str = "same"
    thaw: bool = False
    evaluation: str = ""
    forwards: int = 1
    optimizer: str = "sgd"
    early: bool = False
    zeroes: bool = False
    hooks: tuple[str, ...] = ()
    writes: str = ""
    stale: bool = False
    thread: bool = False

    def __str__(self) -> str:
        """Return one line: the seed, the blocks, and fields that differ from their defaults."""
        special = [f"{self.blocks}"]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                special.append(f"{field.name}={value!r}")
        return f"seed {self.seed}: {', '.join(special)}"

    def kinds(self) -> set[str]:
        return {block[0] for block in walk(self.blocks)}

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh) * self.splits


def walk(blocks: tuple[Block, ...]) -> Iterator[Block]:
    for block in blocks:
        yield block
        if block[0] in WRAPPERS:
            yield from walk(block[1:])


def draw(seed: int, max_blocks: int = 5, *, splits: bool = False) -> Case:
    """Return the case of a seed.

    Args:
        max_blocks: largest number of top-level blocks; with fewer, cases run faster.
        splits: whether to apply tensor parallelism to some blocks.
    """
    rng = Random(seed)
    values: dict[str, Any] = {"seed": seed, **_training(rng), **_strategy(rng), **_pipeline(rng)}
    values |= _habits(rng)
    values["precision"] = _rarely(rng, rng.choice(PRECISIONS), "float64", 0.6)
    values["dim"] = 16 if values["precision"] == "fp8" else rng.randint(2, 7)
    values["blocks"] = tuple(_block(rng, 0) for _ in range(rng.randint(1, max_blocks)))
    if splits:
        values |= _split(rng, values["blocks"])
    values["overrides"] = _overrides(rng, len(values["blocks"]), values["mesh"][-1])
    return _allowed(Case(**values))


def _split(rng: Random, blocks: tuple[Block, ...]) -> dict[str, Any]:
    def replaced(block: Block, share: float) -> Block:
        kind, *parts = block
        if kind in WRAPPERS:
            return (kind, *(replaced(part, share) for part in parts))
        return (rng.choice(tuple(SPLIT)),) if rng.random() < share else block

    first, *others = blocks
    mesh = rng.choice(((2,),) * 5 + ((1,), (2, 1), (2, 2)))
    return {
        "blocks": (replaced(first, 1.0), *(replaced(block, 0.4) for block in others)),
        "mesh": mesh,
        "splits": 2,
        "reshard": rng.choice((True, True, False, mesh[-1])),
    }


def _rarely(rng: Random, special: Any, usual: Any, share: float) -> Any:
    return special if rng.random() < share else usual


def _block(rng: Random, depth: int) -> Block:
    if depth < 2 and rng.random() < 0.3:
        kind = rng.choice(tuple(WRAPPERS))
        return (kind, *(_block(rng, depth + 1) for _ in range(rng.choice((1, 1, 2, 3)))))
    special = rng.random()
    if special < 0.25:
        return ("linear",)
    if special < 0.4:  # reuse an earlier block, or a linear tied to one
        return (rng.choice(("again", "tied")), rng.randint(0, 20))
    return (rng.choice((*MODULES, *FORMULAS)),)


def _strategy(rng: Random) -> dict[str, Any]:
    shapes = ((2,),) * 6 + ((1,), (3,), (4,), (2, 2), (1, 2), (2, 1))
    mesh = rng.choice(shapes)
    divisors = [k for k in (1, 2, 4) if mesh[-1] % k == 0]
    return {
        "mesh": mesh,
        "reshard": rng.choice((True, True, True, False, rng.choice(divisors))),
        "frozen": _rarely(
            rng, tuple(rng.random() < 0.5 for _ in range(rng.randint(1, 4))), (), 0.3
        ),
        "ignored": _rarely(rng, tuple({rng.randint(0, 9), rng.randint(0, 9)}), (), 0.1),
        "offload": _rarely(rng, "shards", "", 0.15),
        "sync": rng.random() < 0.3,
    }


def _overrides(rng: Random, num_blocks: int, num_shards: int) -> tuple[tuple[str, str, Any], ...]:
    choices: tuple[tuple[str, Any], ...] = (
        ("shard", False),
        ("shard", False),
        ("reshard_after_forward", False),
        ("reshard_after_forward", num_shards),
        ("offload_policy", "shards"),
        ("mp_policy", "wide_sums"),
    )
    globs = ("*weight*", "*bias*", "*p0", *(f"blocks.{i}.*" for i in range(num_blocks)))
    count = rng.choice((0, 0, 0, 1, 1, 2, 3))
    return tuple((rng.choice(globs), *rng.choice(choices)) for _ in range(count))


def _pipeline(rng: Random) -> dict[str, Any]:
    fields = (
        ("overlap", False),
        ("bucket_cap_mb", rng.choice((1e-5, 1e-4, 1e-3))),
        ("max_in_flight_gb", rng.choice((1e-8, 1e-6))),
        ("memory_budget_gb", 1.0),
        ("activation_memory_budget", rng.choice((0, 0.2, 0.5, 1))),
        ("hardware", rng.choice(("H100", "A100-40GB", "A10G"))),
    )
    schedule = dict(rng.sample(fields, rng.choice((0, 0, 1, 2, 3))))
    if "overlap" in schedule:
        for name in ("bucket_cap_mb", "max_in_flight_gb", "memory_budget_gb"):
            schedule.pop(name, None)
    if "memory_budget_gb" in schedule and "activation_memory_budget" not in schedule:
        schedule["auto"] = True
    return {
        "schedule": tuple(schedule.items()),
        "compiler": _rarely(rng, "inductor", "aot_eager", 0.02),
        "entrance": rng.choice(("module",) * 4 + ENTRANCES),
        "dynamic": rng.choice((None, None, None, True, False)),
    }


def _training(rng: Random) -> dict[str, Any]:
    return {
        "entry": _rarely(rng, "tokens", "floats", 0.3),
        "output": rng.choice(("loss", "loss", "tensor", "tuple", "dict", "parameter")),
        "steps": rng.choice((2, 2, 3)),
        "micros": rng.choice((1, 1, 1, 2, 3)),
        "reduces_micros": rng.random() < 0.3,
        "rows": rng.choice(("same", "same", "by_step", "by_rank", "by_both")),
        "thaw": rng.random() < 0.15,
        "evaluation": rng.choice(("", "", "", "no_grad", "inference_mode")),
        "forwards": rng.choice((1, 1, 1, 1, 2)),
        "optimizer": rng.choice(("sgd", "sgd", "momentum", "adamw")),
        "early": rng.random() < 0.5,
        "zeroes": rng.random() < 0.2,
    }


def _habits(rng: Random) -> dict[str, Any]:
    hooks = rng.sample(tuple(HOOKS), rng.choice((0, 0, 0, 1, 2)))
    return {
        "hooks": tuple(hooks),
        "writes": _rarely(rng, rng.choice(tuple(WRITES_OF_DATA)), "", 0.2),
        "stale": rng.random() < 0.15,
        "thread": rng.random() < 0.1,
    }


def _allowed(case: Case) -> Case:
    """Return the case without combinations that README or torch rules out."""
    changes: dict[str, Any] = {}
    if case.rows != "same":  # sequence parallelism requires an even number of rows
        blocks = tuple(_replaced(block, {"split_sequence"}, "split_mlp") for block in case.blocks)
        case = replace(case, blocks=blocks)
    if case.splits > 1:
        # With two dynamic sizes, plain torch.compile of tensor-parallel linears exceeds Python's
        # recursion limit, or takes minutes.
        changes["dynamic"] = None if case.dynamic else case.dynamic
        changes["rows"] = "by_step" if case.rows == "by_both" else case.rows
        # Plain torch.compile cannot differentiate the result of a split part outside of a graph.
        blocks = tuple(_without_breaks(block, {"outside"}) for block in case.blocks)
        case = replace(case, blocks=blocks)
        # Torch loses a tensor assigned to the data of its own DTensors, and confuses their mesh
        # with random states that forward saves for a checkpoint.
        if case.writes == "scale" or "checkpoint" in case.kinds():
            changes["ignored"] = ()
    if case.precision != "float64":
        changes["blocks"] = tuple(_replaced(block, UNSTEADY, "linear") for block in case.blocks)
    if case.precision not in EXACT:
        changes["compiler"] = "aot_eager"
        changes["entrance"] = "shard" if case.entrance == "shard" else "module"
        changes["ignored"] = ()
    if case.precision == "fp8":
        changes["overrides"] = tuple(o for o in case.overrides if o[1] != "shard")
        blocks = (("linear",), *changes["blocks"])
        changes["blocks"] = tuple(map(_without_breaks, blocks))  # eager parts do not compute in fp8
    if case.kinds() & WRITES:  # with a budget, torch's partitioner repeats the writes
        budget = "activation_memory_budget"
        changes["schedule"] = tuple(item for item in case.schedule if item[0] != budget)
    if "buffers" in case.kinds():
        # Torch's partitioner may save a buffer that the next forward overwrites.
        changes["forwards"] = 1
    if changes.get("ignored", case.ignored):
        changes["sync"] = False  # ignored parameters keep each rank's own values
    if any(map(_is_recomputed_by_python, case.blocks)):
        changes["stale"] = False  # backward recomputes with the changed parameters
    if case.entrance == "method":  # a bound forward skips the hooks of its module
        changes["hooks"] = tuple(hook for hook in case.hooks if not hook.startswith("root"))
    if case.entrance in FUNCTIONS and case.kinds() & BREAKS:
        changes["sync"] = False  # an eager part may run before the sync
    if changes.get("compiler", case.compiler) == "inductor":  # each kernel takes a second
        changes |= {"blocks": case.blocks[:2], "micros": 1, "rows": "same", "forwards": 1}
    blocks = tuple(_without_tables_and_writes(b) for b in changes.get("blocks", case.blocks))
    return replace(case, **{**changes, "blocks": blocks})


UNSTEADY = frozenset(name for name, formula in FORMULAS.items() if formula.jumps) | {
    "fourier",
    "orthogonal",
    "complex",
    "multihead",
    "weight_norm",
    "batch_norm",
    "fixed_norm",
    "pair",
}
"""Blocks that amplify rounding errors too much, or that CPUs do not support in half precision."""


def _replaced(block: Block, leaves: Set[str], by: str) -> Block:
    kind, *rest = block
    if kind in WRAPPERS:
        return (kind, *(_replaced(b, leaves, by) for b in rest))
    return (by,) if kind in leaves else block


def _without_breaks(block: Block, breaks: Set[str] = BREAKS) -> Block:
    kind, *rest = block
    if kind not in WRAPPERS:
        return block
    return ("chain" if kind in breaks else kind, *(_without_breaks(b, breaks) for b in rest))


def _without_tables_and_writes(block: Block, eager: bool = False, repeated: bool = False) -> Block:
    """Replace leaves that list parameters in eager parts, or write buffers in checkpoints.

    Parameters are DTensors in eager parts; in checkpoints, buffers would be written twice.
    """
    kind, *rest = block
    if kind in WRAPPERS:
        eager |= kind == "outside" or _is_recomputed_by_python(block)
        repeated |= kind == "checkpoint"
        return (kind, *(_without_tables_and_writes(b, eager, repeated) for b in rest))
    lists = eager and (kind == "again" or kind.removeprefix("read_") in TABLES)
    writes = repeated and (kind == "again" or kind in WRITES)
    return ("linear",) if lists or writes else block


def _is_recomputed_by_python(block: Block, outside: bool = False) -> bool:
    """Return whether the block has a checkpoint that Dynamo cannot trace and runs in Python."""
    kind, *rest = block
    if kind not in WRAPPERS:
        return False
    if kind == "checkpoint" and (outside or _breaks(block)):
        return True
    return any(_is_recomputed_by_python(b, outside or kind == "outside") for b in rest)


def _breaks(block: Block) -> bool:
    kind, *rest = block
    return kind in BREAKS or (kind in WRAPPERS and any(map(_breaks, rest)))
