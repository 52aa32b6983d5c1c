"""Partition the joint graph of a training step into a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from .._torch.aot_graphs import number_inputs
from .._torch.inductor import (
    CustomPartitionerFn,
    min_cut_rematerialization_partition,
    saving_activations,
)
from .._torch.unused_work import generating_code_later
from ..passes.contract import Stage
from ..passes.reshard import param_derived
from ..show.dump_folder import DumpWriter
from .run_passes import run_stage
from .settings import CompileSettings
from .verify import verify_partition


class CutGraphs(NamedTuple):
    """A joint graph, cut into forward and backward."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    param_derived: frozenset[str]  # names of nodes computed from parameters alone, not to be saved
    num_outputs: int  # number of forward's outputs that precede the saved values


class Partitioner(CustomPartitionerFn):
    """Custom partitioner: the joint passes, torch's min-cut, and the passes on both graphs.

    Verifies that forward saves no values computed from parameters alone, except those of kept
    parameters and secondary shards.
    """

    def __init__(self, settings: CompileSettings, writer: DumpWriter) -> None:
        self._settings, self._writer = settings, writer

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.save(self.cut(gm, joint_inputs, **kwargs))

    def cut(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> CutGraphs:
        """Run the joint passes on ``gm``, in place, then torch's min-cut partitioner."""
        with saving_activations(self._settings.schedule.activation_memory_budget):
            run_stage(Stage.JOINT, gm, self._settings.pass_context(), self._writer)
            derived = frozenset(node.name for node in param_derived(gm.graph))
            parts = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
            forward, backward = map(generating_code_later, parts)  # AOTAutograd copies backward
        number_inputs(forward.graph, backward.graph)
        return CutGraphs(forward, backward, derived, kwargs["num_fwd_outputs"])

    def save(self, cut: CutGraphs) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Choose what forward saves, rewrite both graphs in place, and return them."""
        context = self._settings.pass_context()
        context.backward, context.num_outputs = cut.backward, cut.num_outputs
        run_stage(Stage.PARTITIONED, cut.forward, context, self._writer)
        verify_partition(cut.forward, cut.param_derived.difference(context.kept), cut.num_outputs)
        return cut.forward, cut.backward

    def uuid(self) -> bytes | None:
        return self._settings.pass_uuid()

    def __getstate__(self) -> dict[str, object]:
        return {}  # cache keys contain the uuid instead
