"""Settings of one compile: the compiler, the device, and the policy that decides the schedule.

Passes ask here for every decision: which parameters to keep unsharded, which activations to
offload, which buckets to make. All answers follow from the user's ``SchedulePolicy``, unless this
rank follows the plans of the first rank (``graphshard.ranks.plan_consensus``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .. import passes
from .._torch.inductor import get_hash_for_files
from ..cost.model import CostModel
from ..kinds import GraphKind
from ..options.schedule_policy import SchedulePolicy
from ..planning.keep_unsharded import choose_kept
from ..planning.offload import (
    SavedActivation,
    add_host_copies,
    choose_offloaded,
    without_host_copies,
)
from ..planning.plan import Bucket, Plan, PlanParam, Problem, Regions, Transfer
from ..planning.repeats import saves_time
from ..planning.saving import Saving
from ..ranks.common_form import kept_inputs
from ..ranks.plan_consensus import place_buckets

_FOLDERS = (Path(__file__).parents[1], Path(passes.__file__).parent)


def source_files() -> list[str]:
    """Return the paths of our source files, whose hash is part of every compile cache's key."""
    return sorted({str(path) for folder in _FOLDERS for path in folder.rglob("*.py")})


_SOURCES = tuple(source_files())


def sources_hash() -> str:
    """Return a hash of our source files."""
    return get_hash_for_files(_SOURCES).hex()


@dataclass(frozen=True)
class CompileSettings:
    """How the graphs of one Dynamo graph are compiled and scheduled.

    Attributes:
        compiler: "inductor" or "aot_eager".
        schedule: the user's policy.
        device: compute device.
        baked_in: other facts that graphs and plans depend on (``pipeline.baked_in``); ranks may
            differ.
        first_rank_plans: the first rank's plans by kind of graph, if they differ from this rank's;
            empty while this rank decides for itself.
        saving: choice of ``SchedulePolicy.auto``; None: the schedule alone decides.
        regathered: graph inputs that ``saving`` leaves to the schedule; ranks may differ.
    """

    compiler: str
    schedule: SchedulePolicy
    device: torch.device
    baked_in: str = ""
    first_rank_plans: Mapping[GraphKind, Plan] = field(default_factory=dict)
    saving: Saving | None = None
    regathered: frozenset[int] = frozenset()

    def following(self, plans: Sequence[Plan]) -> CompileSettings:
        """Return settings under which graphs get the buckets of ``plans``, one of each kind."""
        return dataclasses.replace(self, first_rank_plans={plan.graph: plan for plan in plans})

    def fingerprint(self) -> str:
        """Return a text of the settings that are chosen for all ranks."""
        hardware = self.cost_model().hardware.to_json()
        where = self.device.type
        chosen = f"{self.schedule} {self.saving}"
        return f"{self.compiler} {chosen} {hardware} {where} {self.first_rank_plans}"

    def facts(self) -> str:
        """Return the facts that a compile depends on besides its Dynamo graph, one per line."""
        return f"options: {self.fingerprint()!r}\n{self.baked_in}"

    def cache_key(self, *texts: str) -> bytes:
        """Return a hash of our sources, ``texts``, and everything else that graphs and plans use.

        The table in ``pipeline.baked_in`` lists all of it.
        """
        facts = [*texts, self.fingerprint(), self.baked_in, str(sorted(self.regathered))]
        return get_hash_for_files(_SOURCES, "\n".join(facts))

    def pass_uuid(self) -> bytes | None:
        """Return the key of our passes in Inductor's caches, or None to disable caching."""
        return self.cache_key() if self.caches_graphs else None

    @property
    def caches_graphs(self) -> bool:
        """Whether graphs may be cached; a user's function cannot be part of a key."""
        return self.schedule.node_cost is None

    def cost_model(self) -> CostModel:
        """Return the cost model for graphs on the device."""
        model = self.schedule.cost_model(self.device)
        return dataclasses.replace(model, fuses=self.compiler == "inductor")

    def choose_kept(
        self,
        forward: Problem,
        backward: Problem,
        gathered_in_forward: Mapping[int, Transfer],
        cost_model: CostModel,
    ) -> Sequence[int]:
        """Return the transfers that ``backward`` leaves out; see ``planning.keep_unsharded``."""
        if GraphKind.FORWARD in self.first_rank_plans:
            inputs = kept_inputs(self.first_rank_plans[GraphKind.FORWARD])
            return [i for i, t in gathered_in_forward.items() if t.param in inputs]
        peak_bytes = self.schedule.limits().peak
        kept = choose_kept(forward, backward, gathered_in_forward, cost_model, peak_bytes)
        if self.saving is None or not self.saving.all_params:
            return kept
        free = [i for i, t in gathered_in_forward.items() if t.param not in self.regathered]
        return sorted({*kept, *free})

    @property
    def may_offload_activations(self) -> bool:
        """Whether activations may be offloaded to stay within a memory budget."""
        limited = self.schedule.limits().peak is not None
        may_offload = self.saving is None or self.saving.offloads
        return limited and may_offload and self.schedule.overlap and self.device.type != "cpu"

    @property
    def may_share_regions(self) -> bool:
        """Whether repeated layers may be compiled once; "auto" does so with Inductor only."""
        regions = self.schedule.regions
        return regions is True or (regions == "auto" and self.compiler == "inductor")

    def shares(self, regions: Regions) -> bool:
        """Return whether compiling these regions once is worth it."""
        return self.schedule.regions is True or saves_time(regions)

    def choose_offloaded(
        self,
        forward: Problem,
        backward: Problem,
        saved: Sequence[SavedActivation],
        cost_model: CostModel,
    ) -> Sequence[int]:
        """Return which of ``saved`` to offload; see ``planning.offload``."""
        return choose_offloaded(forward, backward, saved, self.schedule.limits(), cost_model)

    def plan_buckets(
        self,
        problem: Problem,
        params: Sequence[PlanParam],
        cost_model: CostModel,
        *,
        refine: bool = True,
    ) -> tuple[Bucket, ...]:
        """Return the buckets of a graph, host copies included, in launch order.

        Args:
            params: parameters of ``problem``.
            refine: see ``planning.search.find_schedule``.
        """
        collectives = without_host_copies(problem)
        if problem.graph in self.first_rank_plans:
            buckets = place_buckets(collectives, params, self.first_rank_plans[problem.graph])
        else:
            buckets = self.schedule.plan_buckets(collectives, cost_model, refine=refine)
        hides_copies = cost_model if self.schedule.overlap else None
        return add_host_copies(problem, buckets, hides_copies, self.schedule.limits())
