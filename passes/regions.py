"""Lowered graph: replace repeated layers with calls of one subgraph, which is compiled once.

    before   launch b   wait a   mm   relu   wait b   mm_1   relu_1   ..
    after    launch b   wait a   region_0(..)   wait b   region_0(..)   ..

A region is a run of compute between launches and waits, which stay where they are. Regions are
equal if they run the same operations in the same order on values of the same dtypes, sizes, strides
and devices, and on GPUs of the same alignment; the code compiled for one then works for all. A
region that occurs only once stays inline, and fuses with its neighbors.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphshard._torch.aot_graphs import graph_kind
from graphshard._torch.inductor import call_subgraph, lookup_seed, uses_channels_last
from graphshard._torch.tensors import has_lazy_bits, writes_arguments
from graphshard.cost.fusion import GraphValues
from graphshard.ops.nodes import (
    PLANNED,
    is_random,
    replace_in_output,
    root_of,
    users_through_views,
)
from graphshard.passes.contract import PassContext
from graphshard.passes.region_boundaries import is_pointwise, is_pure, recompute_at_users
from graphshard.planning.plan import Regions
from graphshard.planning.repeats import find_repeats, pieces

_LEAST_SAVED = 24  # minimum number of nodes that a repeat saves the compiler
_LEAST_NODES = 4  # minimum size of a region: calling a smaller one costs more than it saves

RegionKey = tuple[Hashable, ...]  # description of a region, equal for equal regions


def share_regions(gm: fx.GraphModule, context: PassContext) -> None:
    """Replace equal regions with calls of a shared subgraph, in place, if ``is_worth_sharing``."""
    assert context.is_worth_sharing is not None
    shared = _find_regions(gm.graph)
    counts = _count(gm.graph, shared)
    if not shared or not context.is_worth_sharing(counts):
        return
    names: dict[RegionKey, str] = {}
    returned: dict[fx.Node, fx.Node] = {}
    for region in shared:
        name = names.setdefault(region.key, f"region_{len(names)}")
        returned |= region.replace_by_call(gm.graph, name)
    replace_in_output(gm.graph, returned)
    for region in shared:
        for node in reversed(region.nodes):
            gm.graph.erase_node(node)
    context.regions = counts


def _find_regions(graph: fx.Graph) -> list[_Region]:
    """Recompute values at region boundaries; return the regions that occur more than once."""
    _gather_parts_of_tuples(graph)
    compute = [node for node in graph.nodes if _may_be_inside(node)]
    labels: dict[Hashable, int] = {}
    sequence = [labels.setdefault(_label(node), len(labels)) for node in compute]
    cuts = _cuts(graph, compute)
    # Inductor keeps a channels-last layout from one convolution to the next, and a region boundary
    # would add copies between layouts. Layers with convolutions therefore stay inline.
    keeps_layouts = not uses_channels_last(graph, graph_kind(graph))
    conv = torch.ops.aten.convolution.default
    runs = [
        [compute[i] for i in piece]
        for repeat in find_repeats(sequence, _LEAST_SAVED)
        if keeps_layouts or all(n.target is not conv for n in compute[repeat.start : repeat.stop])
        for piece in pieces(repeat, cuts)
    ]
    regions = map(_Region, recompute_at_users(graph, list(map(_with_parts_of_tuples, runs))))
    large = [r for r in regions if len(r.nodes) >= _LEAST_NODES and not r.passes_lazy_bits()]
    num_equal = Counter(region.key for region in large)
    shared = [region for region in large if num_equal[region.key] > 1 and region.outputs]
    return _with_returned_values(graph, shared)


def _count(graph: fx.Graph, shared: Sequence[_Region]) -> Regions:
    sizes = {region.key: len(region.nodes) for region in shared}
    home = {node: i for i, region in enumerate(shared) for node in region.nodes}
    kernels = GraphValues(graph).fused_kernels
    return Regions(
        num_compiled_regions=len(sizes),
        num_calls=len(shared),
        num_nodes=len(home),
        num_compiled=sum(sizes.values()),
        num_lost_fusions=sum(len({home.get(n) for n in k.nodes}) - 1 for k in kernels),
    )


def _gather_parts_of_tuples(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), (tuple, list)) and PLANNED not in node.meta:
            parts = [user for user in node.users if user.target is operator.getitem]
            for part in reversed(parts):  # right after the operator that returns the tuple
                node.append(part)


def _with_parts_of_tuples(run: Sequence[fx.Node]) -> list[fx.Node]:
    """Return a run with all parts of its tuples, and no others: no region may pass a tuple."""
    nodes: list[fx.Node] = []
    for node in run:
        if node.target is not operator.getitem:
            nodes += [node, *(user for user in node.users if user.target is operator.getitem)]
    return nodes


def _may_be_inside(node: fx.Node) -> bool:
    """Return whether a node may be in a region: a pure operator that takes tensors."""
    if node.op != "call_function" or PLANNED in node.meta:
        return False
    if node.target is operator.getitem:
        return _may_be_inside(node.args[0])  # type: ignore[arg-type]  # the tuple's node
    return bool(node.all_input_nodes) and is_pure(node)


def _cuts(graph: fx.Graph, compute: Sequence[fx.Node]) -> list[int]:
    """Return the positions in ``compute`` before which other nodes must run."""
    position = {node: i for i, node in enumerate(compute)}
    cuts, next_position = [0], 0
    # Position of the last compute node that each node depends on.
    latest: dict[fx.Node, int] = {}
    for node in graph.nodes:
        of_inputs = max((latest[used] for used in node.all_input_nodes), default=-1)
        latest[node] = position.get(node, of_inputs)
        if node in position:
            next_position = position[node] + 1
        # An unplanned node that depends on no compute since the last cut can run at that cut, and
        # needs no new one, unless it draws random numbers, whose order must not change.
        elif node.op == "call_function" and (
            PLANNED in node.meta or of_inputs >= cuts[-1] or is_random(node)
        ):
            cuts.append(next_position)
    return sorted(set(cuts))


# --- comparison of nodes -------------------------------------------------------------------------


def _label(node: fx.Node) -> Hashable:
    """Return a description of a node that is equal for corresponding nodes of similar layers."""
    return _described(node, lambda used: metadata(used.meta.get("val")))


def _described(node: fx.Node, describe: Callable[[fx.Node], Hashable]) -> Hashable:
    args = node.args[:1] if node.target is lookup_seed else node.args
    return (
        str(node.target),
        frozen(args, describe),
        frozen(node.kwargs, describe),
        metadata(node.meta.get("val")),
    )


def frozen(value: object, describe: Callable[[fx.Node], Hashable]) -> Hashable:
    """Return arguments in hashable form, with ``describe(node)`` in place of nodes."""
    if isinstance(value, fx.Node):
        return describe(value)
    if isinstance(value, (tuple, list)):
        return tuple(frozen(part, describe) for part in value)
    if isinstance(value, dict):
        return tuple((name, frozen(part, describe)) for name, part in value.items())
    return repr(value)


def metadata(value: object) -> Hashable:
    """Return those properties of a value on which compiled code depends, such as strides."""
    if isinstance(value, (tuple, list)):
        return tuple(map(metadata, value))
    if not isinstance(value, torch.Tensor):
        return repr(value)
    strides = tuple(map(str, value.stride())) if value.layout is torch.strided else None
    return (
        str(value.dtype), tuple(map(str, value.shape)), strides, str(value.layout),
        str(value.device), value.is_conj(), value.is_neg(),
    )  # fmt: skip


# --- regions -------------------------------------------------------------------------------------

# A node that a region reads and, if it is the tensor of random seeds, the position of the seed.
Input = tuple[fx.Node, int | None]


class _Region:
    """Nodes of a graph to replace with one call.

    Attributes:
        nodes: nodes in graph order; no other node between them depends on any of them.
        key: key that is equal for all regions that one subgraph can replace.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = nodes
        self._inside = set(nodes)
        self.key = self._region_key()

    @property
    def inputs(self) -> list[Input]:
        """Outside values that the region reads; they change as calls replace other regions."""
        read = dict.fromkeys(
            (used, _seed_of(node)) for node in self.nodes for used in node.all_input_nodes
        )
        return [pair for pair in read if pair[0] not in self._inside]

    @property
    def outputs(self) -> list[fx.Node]:
        return [n for n in self.nodes if any(user not in self._inside for user in n.users)]

    def passes_lazy_bits(self) -> bool:
        """Return whether an input or output is lazily conjugated or negated."""
        # ``invoke_subgraph`` has no kernel for such tensors.
        passed = [*(node for node, _ in self.inputs), *self.outputs]
        return any(has_lazy_bits(node.meta["val"]) for node in passed)

    def _region_key(self) -> RegionKey:
        number: dict[Input, int] = {pair: i for i, pair in enumerate(self.inputs)}
        values = [(metadata(pair[0].meta["val"]), _alignment(*pair)) for pair in number]
        number |= {(node, None): i for i, node in enumerate(self.nodes, len(number))}

        def described(node: fx.Node) -> Hashable:
            seed = _seed_of(node)
            return _described(node, lambda used: number.get((used, seed), number.get((used, None))))

        outputs = tuple(number[node, None] for node in self.outputs)
        return tuple(values), tuple(map(described, self.nodes)), outputs

    def subgraph(self, owner: fx.GraphModule) -> fx.GraphModule:
        graph = fx.Graph()
        made: dict[Input, fx.Node] = {}
        for i, (node, seed) in enumerate(self.inputs):
            made[node, seed] = graph.placeholder(f"in_{i}")
            made[node, seed].meta = {"val": _value(node, seed)}
        for node in self.nodes:
            seed = _seed_of(node)
            arguments = {n: made.get((n, seed)) or made[n, None] for n in node.all_input_nodes}
            copy = graph.node_copy(node, arguments.__getitem__)
            if seed is not None:
                copy.args = (copy.args[0], 0)
            made[node, None] = copy
        graph.output(tuple(made[node, None] for node in self.outputs))
        return fx.GraphModule(owner, graph)

    def replace_by_call(self, graph: fx.Graph, name: str) -> dict[fx.Node, fx.Node]:
        """Insert a call of the region's subgraph, and use its results outside the region.

        Erases no node, and leaves the graph's output as it is.

        Returns:
            The node of each result of the call, keyed by the node that it replaces.
        """
        owner = graph.owning_module
        assert owner is not None
        if not hasattr(owner, name):
            setattr(owner, name, self.subgraph(owner))
        outputs, results = self.outputs, dict[fx.Node, fx.Node]()
        with graph.inserting_before(self.nodes[-1].next):
            arguments = [_argument(graph, node, seed) for node, seed in self.inputs]
            call = call_subgraph(graph, name, arguments)
            call.meta["val"] = tuple(node.meta["val"] for node in outputs)
            for i, node in enumerate(outputs):
                result = results[node] = graph.call_function(operator.getitem, (call, i))
                result.meta = dict(node.meta)
                node.replace_all_uses_with(
                    result, lambda user: user not in self._inside and user.op != "output"
                )
        return results


def _seed_of(node: fx.Node) -> int | None:
    return node.args[1] if node.target is lookup_seed else None  # type: ignore[return-value]


def _alignment(node: fx.Node, seed: int | None) -> Hashable:
    """Return whether an input is aligned, on which code for GPUs depends; None if it does not."""
    # Inductor loads 16 bytes at once if the input of the first call is aligned
    # (``tensor_is_aligned`` in torch/_inductor/utils.py). It loads a seed as a scalar.
    value = node.meta["val"]
    if seed is not None or not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return None
    offset = value.storage_offset()
    # As text, because comparing a symbolic offset could add guards.
    return offset * value.itemsize % 16 == 0 if isinstance(offset, int) else str(offset)


def _value(node: fx.Node, seed: int | None) -> Any:
    value = node.meta["val"]
    return value if seed is None else value[seed : seed + 1]


def _argument(graph: fx.Graph, node: fx.Node, seed: int | None) -> fx.Node:
    if seed is None:
        return node
    # The subgraph gets a slice with only its seed, to keep the keys of regions equal.
    view = graph.call_function(torch.ops.aten.slice.Tensor, (node, 0, seed, seed + 1))
    view.meta = {"val": _value(node, seed)}
    return view


# --- values that only the graph's output reads ----------------------------------------------------


def _with_returned_values(graph: fx.Graph, regions: Sequence[_Region]) -> list[_Region]:
    """Extend each region by the pointwise nodes that read only its values and are only returned.

    Regions that would no longer be equal stay as they are.
    """
    # A forward graph ends with values that only backward reads, such as 1/n of each norm's scale.
    # Outside of the regions, each would be a kernel.
    home = {node: i for i, region in enumerate(regions) for node in region.nodes}
    added: dict[int, list[fx.Node]] = defaultdict(list)
    for node in _only_returned(graph, home):
        places = {home.get(used) for used in node.all_input_nodes}
        if len(places) == 1 and (place := places.pop()) is not None:
            home[node] = place
            added[place].append(node)
    if not added:
        return list(regions)
    extended = [_Region([*region.nodes, *added[i]]) for i, region in enumerate(regions)]
    keys: dict[RegionKey, set[RegionKey]] = defaultdict(set)
    for before, after in zip(regions, extended):
        keys[before.key].add(after.key)
    for i, region in enumerate(regions):
        if len(keys[region.key]) > 1:
            extended[i] = region
            continue
        for node in reversed(added[i]):
            region.nodes[-1].append(node)
    return extended


def _only_returned(graph: fx.Graph, home: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Return the pointwise nodes outside of regions that only the output needs, in graph order."""
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        may_join = node not in home and _may_be_inside(node) and _may_run_earlier(node)
        if may_join and all(user.op == "output" or user in found for user in node.users):
            found[node] = None
    return list(reversed(found))


def _may_run_earlier(node: fx.Node) -> bool:
    """Return whether a node is pointwise and reads no memory that the graph writes."""
    if not is_pointwise(node):
        return False
    users = (user for used in node.all_input_nodes for user in users_through_views(root_of(used)))
    return not any(writes_arguments(user.target) for user in users)
