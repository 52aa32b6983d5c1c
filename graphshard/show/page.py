"""An HTML page of a training step and its graphs: one self-contained file that draws JSON.

    dumps ─► page_data ─► PageData, as JSON in the page ─► page.html draws it

Any source of ``PageData`` gets the same page. Times are in microseconds; unknown values are null.
"""

from __future__ import annotations

import dataclasses
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypedDict

from ..cost.devices import MEMORY_BYTES
from ..kinds import HOST_COPIES, GraphKind, TransferKind
from ..planning.live_bytes import gathered_bytes
from ..planning.simulate import COLLECTIVE, COPY_IN, COPY_OUT, LANES, STEP
from .dump import Dump, param_name
from .step import Phase, training_step
from .table import exposed_reason, is_notable

# Page template; HTML comments are placeholders for the title and the data.
TEMPLATE = Path(__file__).with_name("page.html")

# Fields of ``dump.Totals``, and ``host_copies_us``, which is not part of communication.
Predicted: TypeAlias = dict[str, float]


# Start and duration of the busy times of each lane, since the start of the run.
Lanes: TypeAlias = dict[str, list[tuple[float, float]]]


class Measured(TypedDict):
    """Runs of a graph in a profile."""

    runs: int  # of the first rank that was profiled, like ``median_us``
    median_us: float
    us: float  # duration of the longest run that ``lanes`` shows
    lanes: dict[str, Lanes]  # of the median run of each rank, keyed by the rank's number


class PhaseData(TypedDict):
    """A part of a training step: a graph, or the optimizer."""

    name: str
    graph: int | None  # position in ``PageData.graphs``; None for the optimizer
    count: int  # runs in a step
    us: float  # predicted time of one run


class StepData(TypedDict):
    """A training step, or an evaluation: sums and highest peaks of its graphs."""

    name: str
    phases: list[PhaseData]
    predicted: Predicted
    measured_us: float | None  # time without optimizer; None unless all graphs were measured
    note: str


class ParamData(TypedDict):
    """A parameter, listed with its graph."""

    name: str
    shape: list[int]
    dtype: str
    used: int | None  # first step that uses it unsharded; None if it is not gathered


class StepsData(TypedDict):
    """The steps of a graph, stored by column because there may be thousands."""

    name: list[str]
    module: list[str]  # module whose parameter the step uses, or whose gradient it computes
    start_us: list[float]
    us: list[float]


class BucketData(TypedDict):
    """A bucket; a graph lists its buckets in launch order."""

    kind: str
    label: str
    params: list[int]  # positions in ``GraphData.params``
    bytes: int
    wire_dtypes: list[str]
    ranks: int
    lane: str  # one of ``GraphData.lanes``
    start_us: float
    us: float
    copy_in: tuple[float, float]  # start and duration on the compute lane
    copy_out: tuple[float, float]
    exposed_us: float
    reason: str | None  # None if the bucket is not exposed
    launch: int  # step before which it starts; the number of steps is the end of the graph
    wait: int  # step before which compute waits for it


class UserCollectiveData(TypedDict):
    """A collective that the model itself calls."""

    op: str
    bytes: int
    ranks: int
    start_us: float
    us: float
    exposed_us: float


class BytesData(TypedDict):
    """Bytes for each step."""

    name: str
    bytes: list[int]


class LimitData(TypedDict):
    """Memory limit of a schedule."""

    name: str
    bytes: int


class MemoryData(TypedDict):
    """Memory of a rank over time, as areas, lines and limits of a chart."""

    until_us: list[float]  # ends of steps
    areas: list[BytesData]  # parts that add up to the live memory
    lines: list[BytesData]
    limits: list[LimitData]


class GraphData(TypedDict):
    """A graph with its parameters, schedule and memory."""

    name: str
    source: str  # name of its file
    kind: str
    hardware: str
    ranks: list[int]
    predicted: Predicted
    optimizer_us: float  # see ``Dump.optimizer_us``
    measured: Measured | None
    lanes: list[str]  # lanes in use
    params: list[ParamData]
    kept: list[int]
    reasons: list[tuple[int, str]]
    steps: StepsData
    buckets: list[BucketData]
    user_collectives: list[UserCollectiveData]
    memory: MemoryData


class TableData(TypedDict):
    """A table of strings."""

    title: str
    headers: list[str]
    numbers: list[int]  # positions of numeric columns
    rows: list[list[str]]


class BarData(TypedDict):
    """A bar of a chart, with its label."""

    name: str
    value: float
    text: str  # label of ``value``


class BarsData(TypedDict):
    """A bar chart; its axis runs from 0 to the longest bar."""

    title: str
    bars: list[BarData]


class PageData(TypedDict):
    """Content of a page, in display order."""

    title: str
    steps: list[StepData]  # training, evaluation; only the first has a chart, unless ``compares``
    compares: bool  # whether each step has a chart, all on one time axis
    notes: list[str]  # missing parts, with reasons
    charts: list[BarsData]
    tables: list[TableData]
    graphs: list[GraphData]


def page(data: PageData) -> str:
    """Return the HTML page that shows ``data``."""
    # Escape "<", so that names are never interpreted as HTML.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"title": html.escape(data["title"]), "data": text}
    return re.sub("<!--(title|data)-->", lambda match: parts[match[1]], TEMPLATE.read_text())


def page_data(
    title: str,
    graphs: Sequence[GraphData],
    steps: Sequence[StepData] = (),
    notes: Sequence[str] = (),
    tables: Sequence[TableData] = (),
    charts: Sequence[BarsData] = (),
    *,
    compares: bool = False,
) -> PageData:
    """Assemble a page's data; ``step_data`` and ``steps_data`` make ``steps``."""
    return PageData(
        title=title,
        steps=list(steps),
        compares=compares,
        notes=list(notes),
        charts=list(charts),
        tables=list(tables),
        graphs=list(graphs),
    )


def steps_data(
    dumps: Sequence[Dump],
    graphs: Sequence[GraphData],
    *,
    microbatches: int = 1,
    optimizer_us: float | None = None,
    note: str = "",
) -> list[StepData]:
    """Return the training step, if any graph trains, and the run of all inference graphs, if any.

    Args:
        graphs: data of each dump.
        microbatches: number of microbatches in a step that reduce gradients.
        optimizer_us: time of the optimizer (default: that of a fused AdamW).
        note: text to show with the training step.
    """
    runs = [graph["measured"]["runs"] if graph["measured"] else 0 for graph in graphs]
    trained = training_step(dumps, runs, microbatches)
    steps = []
    if trained:
        name = "optimizer"
        if optimizer_us is None:
            name = "optimizer (a fused AdamW)"
            optimizer_us = sum(graphs[phase.graph]["optimizer_us"] for phase in trained)
        steps.append(step_data("training step", trained, graphs, note))
        if optimizer_us > 0:
            phase = PhaseData(name=name, graph=None, count=1, us=_rounded(optimizer_us))
            steps[0]["phases"].append(phase)
            steps[0]["predicted"]["total_us"] += optimizer_us
    evaluated = [Phase(i) for i, g in enumerate(graphs) if g["kind"] == GraphKind.INFERENCE]
    if evaluated:
        steps.append(step_data("evaluation", evaluated, graphs))
    return steps


def step_data(
    name: str, phases: Sequence[Phase], graphs: Sequence[GraphData], note: str = ""
) -> StepData:
    """Return a step that runs ``phases``: sums of their times, and their highest peaks."""
    run = [(graphs[phase.graph], phase.runs) for phase in phases]
    measured = [count * m["median_us"] for graph, count in run if (m := graph["measured"])]
    predicted = {
        key: max(graph["predicted"][key] for graph, _ in run)
        if key.endswith("_bytes")
        else sum(count * graph["predicted"][key] for graph, count in run)
        for key in run[0][0]["predicted"]
    }
    return StepData(
        name=name,
        phases=[
            PhaseData(name=g["name"], graph=p.graph, count=p.runs, us=g["predicted"]["total_us"])
            for (g, _), p in zip(run, phases)
        ],
        predicted=predicted,
        measured_us=sum(measured) if len(measured) == len(run) else None,
        note=note,
    )


def graph_data(
    dump: Dump, name: str, source: str = "", measured: Measured | None = None
) -> GraphData:
    """Return a graph's data for the page; ``source`` is the name of its file."""
    plan = dump.plan
    return GraphData(
        name=name,
        source=source,
        kind=plan.graph,
        hardware=dump.hardware.name,
        ranks=dump.worlds,
        predicted={
            **dataclasses.asdict(dump.totals),
            "host_copies_us": sum(dump.timeline.busy_us(lane) for lane in HOST_COPIES),
        },
        optimizer_us=_rounded(dump.optimizer_us()),
        measured=measured,
        lanes=[lane for lane in LANES if any(slot.lane == lane for slot in dump.timeline.slots)],
        params=_params(dump),
        kept=list(plan.kept),
        reasons=list(plan.reasons),
        steps=_steps(dump),
        buckets=[_bucket(dump, i) for i in range(len(plan.buckets))],
        user_collectives=_user_collectives(dump),
        memory=_memory(dump),
    )


def _params(dump: Dump) -> list[ParamData]:
    gathers = (t for t in dump.plan.problem.transfers if t.kind == TransferKind.ALL_GATHER)
    used: Mapping[int | None, int] = {t.param: t.due for t in gathers}
    return [
        ParamData(
            name=param_name(param),
            shape=list(param.shape),
            dtype=param.dtype.removeprefix("torch."),
            used=used.get(i),
        )
        for i, param in enumerate(dump.plan.params)
    ]


def _steps(dump: Dump) -> StepsData:
    names = dump.plan.problem.steps
    slots = [dump.slots[STEP, i] for i in range(len(names))]
    return StepsData(
        name=list(names),
        module=dump.step_modules(),
        start_us=[_rounded(slot.start_us) for slot in slots],
        us=[_rounded(slot.duration_us) for slot in slots],
    )


def _bucket(dump: Dump, i: int) -> BucketData:
    bucket, collective = dump.plan.buckets[i], dump.slots[COLLECTIVE, i]
    return BucketData(
        kind=bucket.kind,
        label=dump.bucket_label(bucket),
        params=dump.param_positions(bucket),
        bytes=bucket.num_bytes,
        wire_dtypes=list(dump.plan.wire_dtypes(bucket)),
        ranks=bucket.world,
        lane=collective.lane,
        start_us=_rounded(collective.start_us),
        us=_rounded(collective.duration_us),
        copy_in=_copy(dump, COPY_IN, i),
        copy_out=_copy(dump, COPY_OUT, i),
        exposed_us=_rounded(dump.timeline.exposed_us[i]),
        reason=exposed_reason(dump, i) if is_notable(dump.timeline.exposed_us[i]) else None,
        launch=bucket.launch,
        wait=bucket.wait,
    )


def _user_collectives(dump: Dump) -> list[UserCollectiveData]:
    users, num_buckets = dump.plan.problem.user_collectives, len(dump.plan.buckets)
    slots = [dump.slots[COLLECTIVE, num_buckets + i] for i in range(len(users))]
    return [
        UserCollectiveData(
            op=user.op,
            bytes=user.num_bytes,
            ranks=user.world,
            start_us=_rounded(slot.start_us),
            us=_rounded(slot.duration_us),
            exposed_us=_rounded(exposed_us),
        )
        for user, slot, exposed_us in zip(users, slots, dump.timeline.user_exposed_us)
    ]


def _copy(dump: Dump, kind: str, i: int) -> tuple[float, float]:
    slot = dump.slots[kind, i]
    return _rounded(slot.start_us), _rounded(slot.duration_us)


def _memory(dump: Dump) -> MemoryData:
    timeline, problem = dump.timeline, dump.plan.problem
    gathered = gathered_bytes(problem, dump.plan.buckets)
    others = [alive - part for alive, part in zip(timeline.alive_bytes, gathered)]
    limits = {
        "device": MEMORY_BYTES.get(dump.hardware.name),
        "memory budget": dump.limits.peak,
        "in-flight limit": dump.limits.in_flight,
    }
    ends = (dump.slots[STEP, i].end_us for i in range(problem.num_steps))
    return MemoryData(
        until_us=[_rounded(us) for us in ends],
        areas=[
            BytesData(name="everything except optimizer state", bytes=others),
            BytesData(name="gathered parameters", bytes=gathered),
        ],
        lines=[BytesData(name="in flight", bytes=list(timeline.in_flight_bytes))],
        limits=[LimitData(name=n, bytes=b) for n, b in limits.items() if b is not None],
    )


def _rounded(us: float) -> float:
    return round(us, 3)
