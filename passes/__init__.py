"""The graph passes, and the order in which they run (``PIPELINE``).

``contract`` defines passes and stages. AOTAutograd differentiates the traced graph, torch's
partitioner splits the joint graph, and the compiler runs its own passes after the last stage.
"""

from __future__ import annotations

from graphshard.passes.casts import cast_before_gather
from graphshard.passes.contract import Fact, Pass, Stage, ordered
from graphshard.passes.dedup import merge_markers
from graphshard.passes.float8 import gather_float8, use_float8
from graphshard.passes.inline_layers import inline_layers
from graphshard.passes.layers import share_layers
from graphshard.passes.lower import lower
from graphshard.passes.normalize import normalize
from graphshard.passes.regions import share_regions
from graphshard.passes.reshard import fix_backward_gathers, reshard
from graphshard.passes.saving import (
    clone_mutated_inputs,
    keep_gathered,
    keep_secondary_shards,
    note_held_bytes,
    offload_activations,
)
from graphshard.passes.single_rank import elide_single_rank_collectives
from graphshard.passes.traced import hoist_reads, inline_regions, use_dense_gradients

# ``graphshard.pipeline.run_passes`` runs one stage at a time.
PIPELINE = ordered(
    Pass(inline_regions, Stage.TRACED, provides=(Fact.INLINED,)),
    Pass(hoist_reads, Stage.TRACED, requires=(Fact.INLINED,), provides=(Fact.READS_OUTSIDE,)),
    Pass(use_dense_gradients, Stage.TRACED, requires=(Fact.INLINED,)),
    Pass(use_float8, Stage.TRACED, requires=(Fact.READS_OUTSIDE,)),
    Pass(share_layers, Stage.TRACED, requires=(Fact.READS_OUTSIDE,)),
    #
    Pass(inline_layers, Stage.JOINT, provides=(Fact.ONE_GRAPH,)),
    Pass(merge_markers, Stage.JOINT, requires=(Fact.ONE_GRAPH,), provides=(Fact.ONE_MARKER,)),
    Pass(cast_before_gather, Stage.JOINT, requires=(Fact.ONE_MARKER,)),
    Pass(gather_float8, Stage.JOINT, requires=(Fact.ONE_MARKER,), provides=(Fact.WIRE_DTYPES,)),
    Pass(
        fix_backward_gathers,
        Stage.JOINT,
        requires=(Fact.ONE_MARKER, Fact.WIRE_DTYPES),
        provides=(Fact.GATHERS_KNOWN,),
    ),
    Pass(reshard, Stage.JOINT, requires=(Fact.GATHERS_KNOWN,), provides=(Fact.TAGGED,)),
    Pass(
        elide_single_rank_collectives,
        Stage.JOINT,
        requires=(Fact.TAGGED, Fact.WIRE_DTYPES),
        # Offloading is planned in steps, which begin at these markers.
        when=lambda context: context.choose_offloaded is None,
    ),
    #
    Pass(keep_secondary_shards, Stage.PARTITIONED, requires=(Fact.GATHERS_KNOWN,)),
    Pass(note_held_bytes, Stage.PARTITIONED, provides=(Fact.HELD_BYTES,)),
    Pass(
        keep_gathered,
        Stage.PARTITIONED,
        requires=(Fact.HELD_BYTES,),
        provides=(Fact.KEPT,),
        when=lambda context: context.choose_kept is not None,
        dump="keep-{kind}",
    ),
    Pass(
        offload_activations,
        Stage.PARTITIONED,
        requires=(Fact.KEPT,),  # kept parameters leave less memory for activations
        when=lambda context: context.choose_offloaded is not None,
        dump="offload-{kind}",
    ),
    Pass(clone_mutated_inputs, Stage.PARTITIONED, requires=(Fact.KEPT,)),
    #
    Pass(merge_markers, Stage.FINAL, provides=(Fact.ONE_MARKER,)),
    # In training, these passes run on the joint graph; inference has none.
    Pass(cast_before_gather, Stage.FINAL, requires=(Fact.ONE_MARKER,), inference_only=True),
    Pass(
        gather_float8,
        Stage.FINAL,
        requires=(Fact.ONE_MARKER,),
        provides=(Fact.WIRE_DTYPES,),
        inference_only=True,
    ),
    Pass(
        elide_single_rank_collectives,
        Stage.FINAL,
        requires=(Fact.WIRE_DTYPES,),
        inference_only=True,
    ),
    Pass(normalize, Stage.FINAL, provides=(Fact.NORMALIZED,)),
    Pass(
        lower,
        Stage.FINAL,
        requires=(Fact.NORMALIZED, Fact.WIRE_DTYPES),
        provides=(Fact.LOWERED,),
        when=lambda context: context.plan_buckets is not None,
    ),
    #
    Pass(
        share_regions,
        Stage.LOWERED,
        requires=(Fact.LOWERED,),
        when=lambda context: context.is_worth_sharing is not None,
    ),
)
