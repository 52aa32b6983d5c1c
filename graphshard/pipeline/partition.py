"""The joint graph of a training step becomes a forward and a backward graph."""

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
    """A joint graph that was cut in two.

    Attributes:
        derived: names of the nodes that forward must not save, since parameters determine them.
        num_outputs: how many of the forward's outputs are the user's; the rest is saved.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    derived: frozenset[str]
    num_outputs: int


class Partitioner(CustomPartitionerFn):
    """Runs the joint passes, then torch's min-cut partitioner, and checks what it saves."""

    def __init__(self, settings: CompileSettings, writer: DumpWriter) -> None:
        self._settings, self._writer = settings, writer

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        return self.save(self.cut(gm, joint_inputs, **kwargs))

    def cut(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> CutGraphs:
        """Cut a joint graph, which is changed by that, where little has to be saved."""
        with saving_activations(self._settings.schedule.activation_memory_budget):
            with self._rewriting(joint=gm):
                for joint_pass in passes.JOINT:
                    joint_pass(gm)
                # By ``auto`` a rank may recompute more than others: see ``choose_saving``.
                passes.settle_gathers(gm, ranks_differ=self._settings.saving is not None)
                passes.reshard(gm)
                # Transfers part a graph into steps, between which activations leave and come back.
                if not self._settings.may_offload_activations:
                    passes.send_nothing_alone(gm)
            derived = {node.name for node in passes.parameter_derived(gm.graph)}
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        number_inputs(forward.graph, backward.graph)
        return CutGraphs(forward, backward, frozenset(derived), kwargs["num_fwd_outputs"])

    def save(self, cut: CutGraphs) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Choose what forward saves; in place. Return both graphs."""
        forward, backward, derived, num_outputs = cut
        kept = self._choose_what_is_saved(forward, backward, num_outputs)
        passes.save_as_it_was(forward.graph, num_outputs)
        _check(forward)
        verify_partition(forward, sorted(derived.difference(kept)), num_outputs)
        return forward, backward

    def _choose_what_is_saved(
        self, forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int
    ) -> list[str]:
        """Save more of some parameters than their shards, and less of the activations.

        Returns:
            Names of the forward's nodes that hold a gathered parameter and are saved.
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
        """Dump the code of ``parts`` before and after a rewrite, and check them behind it."""
        for name, part in parts.items():
            self._writer.write_code(name, "before", part.graph)
        yield
        for name, part in parts.items():
            _check(part)
            self._writer.write_code(name, "after", part.graph)

    def uuid(self) -> bytes | None:
        return self._settings.pass_uuid()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # what is pickled into a cache key is the uuid


def _check(gm: fx.GraphModule) -> None:
    gm.graph.lint()
    gm.recompile()
