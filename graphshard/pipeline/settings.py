"""Settings of one compile: the compiler, the device, and the policy that decides the schedule.

All decisions of passes are made here: which parameters to keep unsharded, which activations to
offload, which buckets to make. They follow the user's ``SchedulePolicy``, unless this rank follows
the plans of the first rank (``graphshard.ranks.plan_consensus``).

A cached graph is not planned again. Everything that is read while a graph is compiled is therefore
part of the one key that we add to every cache, ``CompileSettings.cache_key``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import passes
from .._torch.distributed import process_group
from .._torch.inductor import get_hash_for_files, settings_text
from .._torch.tensors import size_hint
from ..cost.model import CostModel
from ..kinds import GraphKind
from ..ops.groups import span_of
from ..options.schedule_policy import SchedulePolicy
from ..passes.contract import PassContext
from ..planning.follow_plan import follow_plan
from ..planning.keep_unsharded import choose_kept
from ..planning.offload import add_host_copies, choose_offloaded, without_host_copies
from ..planning.plan import Bucket, Plan, PlanParam, Problem, Regions, Transfer
from ..planning.repeats import saves_time
from ..planning.saving import Saving

_FOLDERS = (Path(__file__).parents[1], Path(passes.__file__).parent)


def source_files() -> list[str]:
    """Return the paths of our source files, whose hash is part of every compile cache's key."""
    suffixes = {".py", ".toml"}  # rates of devices are data
    paths = (path for folder in _FOLDERS for path in folder.rglob("*"))
    return sorted({str(path) for path in paths if path.suffix in suffixes})


_SOURCES = tuple(source_files())


def sources_hash() -> str:
    """Return a hash of our source files."""
    return get_hash_for_files(_SOURCES).hex()


@dataclass(frozen=True)
class CompileSettings:
    """Settings for compiling and scheduling the graphs of one Dynamo graph.

    Attributes:
        compiler: "inductor" or "aot_eager".
        baked_in: other facts that graphs and plans depend on, as returned by :func:`baked_in`; they
            may differ between ranks.
        first_rank_plans: the first rank's plans, keyed by kind of graph, if they differ from this
            rank's; empty while this rank decides for itself.
        saving: choice of ``SchedulePolicy.auto``, or None if the schedule alone decides.
        regathered: positions of the inputs that ``saving`` does not keep, because overrides set
            ``reshard_after_forward`` for them; ranks may differ.
    """

    compiler: str
    schedule: SchedulePolicy
    device: torch.device
    baked_in: str = ""
    first_rank_plans: Mapping[GraphKind, Plan] = field(default_factory=dict)
    saving: Saving | None = None
    regathered: frozenset[int] = frozenset()

    def following(self, plans: Sequence[Plan]) -> CompileSettings:
        return dataclasses.replace(self, first_rank_plans={plan.graph: plan for plan in plans})

    def with_saving(self, saving: Saving, budget_gb: float) -> CompileSettings:
        schedule = dataclasses.replace(
            self.schedule,
            auto=False,
            activation_memory_budget=saving.activations,
            memory_budget_gb=budget_gb,
        )
        return dataclasses.replace(self, schedule=schedule, saving=saving)

    def fingerprint(self) -> str:
        """Return all fields but ``baked_in`` and ``regathered``, as text, with the rates in use."""
        # Leave out the path of a hardware file: plans only depend on the rates in it.
        chosen = f"{dataclasses.replace(self.schedule, hardware='auto')} {self.saving}"
        hardware = f"{self.cost_model().hardware.to_json()} {self.device.type}"
        return f"{self.compiler} {chosen} {hardware} {self.first_rank_plans}"

    def facts(self) -> str:
        """Return ``fingerprint`` and ``baked_in`` as lines of text."""
        return f"options: {self.fingerprint()!r}\n{self.baked_in}"

    def cache_key(self, *texts: str) -> bytes:
        """Return a hash of our sources, ``texts`` and everything else that a compile reads."""
        facts = [*texts, self.fingerprint(), self.baked_in, str(sorted(self.regathered))]
        return get_hash_for_files(_SOURCES, "\n".join(facts))

    def pass_uuid(self) -> bytes | None:
        """Return the key of our passes in Inductor's caches, or None to disable caching."""
        return self.cache_key() if self.caches_graphs else None

    @property
    def caches_graphs(self) -> bool:
        # A user's function cannot be part of a key.
        return self.schedule.node_cost is None

    def cost_model(self) -> CostModel:
        model = self.schedule.cost_model(self.device)
        return dataclasses.replace(model, fuses=self.compiler == "inductor")

    def choose_kept(
        self,
        forward: Problem,
        backward: Problem,
        gathered_in_forward: Mapping[int, Transfer],
        cost_model: CostModel,
    ) -> Sequence[int]:
        """Return the positions in ``backward.transfers`` of the gathers to remove.

        Args:
            gathered_in_forward: see ``planning.keep_unsharded.choose_kept``.
        """
        if GraphKind.FORWARD in self.first_rank_plans:
            followed = self.first_rank_plans[GraphKind.FORWARD]
            inputs = {followed.params[i].input for i in followed.kept}
            return [i for i, t in gathered_in_forward.items() if t.param in inputs]
        limits = self.schedule.limits()
        kept = choose_kept(forward, backward, gathered_in_forward, cost_model, limits)
        if self.saving is None or not self.saving.all_params:
            return kept
        free = [i for i, t in gathered_in_forward.items() if t.param not in self.regathered]
        return sorted({*kept, *free})

    @property
    def may_offload_activations(self) -> bool:
        limited = self.schedule.limits().peak is not None
        may_offload = self.saving is None or self.saving.offloads
        return limited and may_offload and self.schedule.overlap and self.device.type != "cpu"

    def pass_context(self, kind: GraphKind | None = None) -> PassContext:
        regions = self.schedule.regions
        shares = regions is True or (regions == "auto" and self.compiler == "inductor")
        choose = functools.partial(choose_offloaded, limits=self.schedule.limits())
        return PassContext(
            cost_model=self.cost_model(),
            kind=kind,
            ranks_differ=self.saving is not None,  # see ``choose_saving``
            choose_kept=self.choose_kept if self.schedule.overlap else None,
            choose_offloaded=choose if self.may_offload_activations else None,
            plan_buckets=self.plan_buckets,
            is_worth_sharing=self._is_worth_sharing if shares else None,
        )

    def _is_worth_sharing(self, regions: Regions) -> bool:
        return self.schedule.regions is True or saves_time(regions)

    def plan_buckets(
        self,
        problem: Problem,
        params: Sequence[PlanParam],
        cost_model: CostModel,
        *,
        refine: bool = True,
    ) -> tuple[Bucket, ...]:
        """Return the buckets of a graph, including host copies, in launch order.

        For ``refine``, see ``planning.search.find_schedule``.
        """
        collectives = without_host_copies(problem)
        if problem.graph in self.first_rank_plans:
            buckets = follow_plan(collectives, params, self.first_rank_plans[problem.graph])
        else:
            buckets = self.schedule.plan_buckets(collectives, cost_model, refine=refine)
        hides_copies = cost_model if self.schedule.overlap else None
        return add_host_copies(problem, buckets, hides_copies, self.schedule.limits())


# --- facts that a graph depends on but does not contain -------------------------------------------

# Everything that a pass, the planner or torch reads while a graph is compiled. ``cache_key`` is the
# key of our passes in AOTAutograd's and Inductor's caches, and names plan files. Our ops read a
# rank's number at run time; DTensor's code contains the rank's number in its TP group.
#
# read by                                what                             part of the key
# ------------------------------------   ------------------------------   ------------------------
# all passes, planning, cost             our own code                     hash of the source files
# compile, planning, cost                compiler, ``SchedulePolicy``,    ``fingerprint``
#                                        hardware, the first rank's
#                                        plans, ``saving``
# keep_gathered                          ``overrides`` of                 ``cache_key``:
#                                        ``reshard_after_forward``        ``regathered``
# lower, ops, describe, saving,          number of ranks and stride of    ``baked_in``: groups
# float8, single_rank, cost              each group, by name
# ops.groups (uses_all_to_all)           backend of each group            ``baked_in``: groups
# DTensor                                TP groups, the rank in each      ``baked_in``: groups
# float8 (unsupported products)          torch, the device, by name       ``baked_in``: machine
# cost (symbolic sizes, as traced)       sizes of the inputs              ``baked_in``: inputs
# cost (tf32), AOTAutograd's trace,      precision of matrix products,    ``baked_in``: modes
# casts                                  autocast, grad mode, default
#                                        dtype, deterministic algorithms
# partitioner, Inductor's own passes     settings of both, and other      ``baked_in``: torch's
#                                        custom passes                    settings
# all passes                             dtypes, rows, names of groups,   text of the Dynamo
#                                        devices: arguments of markers    graph, which torch's own
#                                                                         keys contain, too


def baked_in(
    inputs: Sequence[object],
    groups: Sequence[str],
    device: torch.device,
    inductor_options: Mapping[str, Any],
    tp_groups: Sequence[str] = (),
) -> str:
    """Return the facts for ``CompileSettings.baked_in``, one per line.

    Args:
        inputs: one example for each placeholder of the Dynamo graph.
        groups: names of all groups that the graph's markers may use.
        inductor_options: the user's options of ``torch.compile``.
        tp_groups: names of the groups over which tensor parallelism splits parameters.
    """
    return "\n".join(
        [
            *(_describe_group(name) for name in groups),
            *(f"{_describe_group(name)}, rank {process_group(name).rank()}" for name in tp_groups),
            f"machine: torch {torch.__version__}, {_device_name(device)}",
            f"inputs: {[_describe_input(value) for value in inputs]}",
            f"modes: {_modes()}",
            f"torch's settings: {settings_text(inductor_options)}",
        ]
    )


def _describe_group(name: str) -> str:
    span = span_of(name)
    backends = dist.get_backend_config(process_group(name))
    return f"group {name}: {span.world} ranks, stride {span.stride}, {backends}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"


def _describe_input(value: object) -> str:
    # Plans depend on sizes as traced, and on whether a gradient is required.
    if isinstance(value, torch.Tensor):
        sizes = [size_hint(size) for size in value.shape]
        return f"{value.dtype} {sizes} {value.device.type} {value.requires_grad}"
    return str(size_hint(value)) if isinstance(value, int | torch.SymInt) else type(value).__name__


def _modes() -> tuple[object, ...]:
    # Torch's global modes that affect the trace or its cost.
    autocast = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    ]
    return (
        autocast,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        _precision(torch.backends.cuda.matmul.fp32_precision),
        _precision(torch.backends.mkldnn.matmul.fp32_precision),  # type: ignore[attr-defined]
        torch.are_deterministic_algorithms_enabled(),
    )


def _precision(name: str) -> str:
    return "ieee" if name == "none" else name  # "none": not set, which means the same here
