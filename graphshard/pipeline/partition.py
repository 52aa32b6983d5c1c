"""Partition the joint graph of a training step into a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import fx

from .. import passes
from .._torch.aot_graphs import number_inputs
from .._torch.inductor import (
    CustomPartitionerFn,
    min_cut_rematerialization_partition,
    saving_activations,
)
from ..show.dump_folder import DumpWriter
from .settings import CompileSettings
from .verify import verify_partition


class CutGraphs(NamedTuple):
    """A joint graph cut in two.

    Attributes:
        param_derived: names of nodes computed from parameters alone; forward must not save them.
        num_outputs: number of the forward's outputs that go to the user; the others are saved.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    param_derived: frozenset[str]
    num_outputs: int


class Partitioner(CustomPartitionerFn):
    """Runs the joint passes and torch's min-cut partitioner, and verifies what forward saves."""

    def __init__(self, settings: CompileSettings, writer: DumpWriter) -> None:
        self._settings, self._writer = settings, writer

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.save(self.cut(gm, joint_inputs, **kwargs))

    def cut(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> CutGraphs:
        """Run the joint passes on ``gm``, in place, then torch's min-cut partitioner."""
        with saving_activations(self._settings.schedule.activation_memory_budget):
            with self._rewriting(joint=gm):
                for joint_pass in passes.JOINT:
                    joint_pass(gm)
                # With ``auto``, ranks may recompute different amounts: see ``choose_saving``.
                passes.fix_backward_gathers(gm, ranks_differ=self._settings.saving is not None)
                passes.reshard(gm)
                # Activation offload needs single-rank collectives, which delimit steps, too.
                if not self._settings.may_offload_activations:
                    passes.elide_single_rank_collectives(gm)
            param_derived = {node.name for node in passes.param_derived(gm.graph)}
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        number_inputs(forward.graph, backward.graph)
        return CutGraphs(forward, backward, frozenset(param_derived), kwargs["num_fwd_outputs"])

    def save(self, cut: CutGraphs) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Choose what forward saves, rewrite both graphs in place, and return them."""
        forward, backward, param_derived, num_outputs = cut
        kept = self._choose_what_is_saved(forward, backward, num_outputs)
        passes.clone_mutated_inputs(forward.graph, num_outputs)
        _check(forward)
        verify_partition(forward, sorted(param_derived.difference(kept)), num_outputs)
        return forward, backward

    def _choose_what_is_saved(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int
    ) -> list[str]:
        """Save some parameters unsharded or as secondary shards, and offload some activations.

        Returns:
            Names of the saved forward nodes that hold an unsharded parameter.
        """
        settings, kept, problems = self._settings, list[str](), None
        graphs, cost_model = (forward.graph, backward.graph, num_outputs), settings.cost_model()
        passes.keep_secondary_shards(*graphs)
        passes.note_held_bytes(forward.graph, backward.graph)
        for part in (forward, backward):
            _check(part)
        if settings.schedule.overlap:
            parts = {"keep-forward": forward, "keep-backward": backward}
            with self._rewriting(**parts):
                problems = passes.read_partition(forward.graph, backward.graph, cost_model)
                kept = passes.keep_gathered(*graphs, cost_model, settings.choose_kept, problems)
        if settings.may_offload_activations:
            parts = {"stow-forward": forward, "stow-backward": backward}
            with self._rewriting(**parts):
                unchanged = None if kept else problems
                choose = settings.choose_offloaded
                passes.offload_activations(*graphs, cost_model, choose, unchanged)
        return kept

    @contextmanager
    def _rewriting(self, **parts: fx.GraphModule) -> Iterator[None]:
        """Dump the code of ``parts`` before and after a rewrite, and lint them after it."""
        for name, part in parts.items():
            self._writer.write_code(name, "before", part.graph)
        yield
        for name, part in parts.items():
            _check(part)
            self._writer.write_code(name, "after", part.graph)

    def uuid(self) -> bytes | None:
        return self._settings.pass_uuid()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # cache keys contain the uuid instead


def _check(gm: fx.GraphModule) -> None:
    gm.graph.lint()
    gm.recompile()
