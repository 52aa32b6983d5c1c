"""What the machine can do: rates of matrix products, memory, kernel launches and links.

A table for common GPUs and a JSON form for what ``calibrate`` measured. Each rate is a peak, by the
datasheet, and the fraction of it that is achieved, by size. The numbers of the table are cited
where they stand; those that many entries share come from

    [tuning]     NCCL, src/graph/tuning.cc: latencies of the ring algorithm, protocol LL
    [topo]       NCCL, src/graph/topo.h: NVLink rates that NCCL achieves, per link
    [nvlink]     NCCL's author in the nccl-tests issue "H100 all reduce performance is poor": rings
                 get 370 of 450 GB/s, NVLink SHARP 480
    [network]    an NCCL author in its issue "Single-node and multi-node performance of H100 nodes":
                 46-48 GB/s for each card of 400 Gb/s
    [mle]        github.com/stas00/ml-engineering: its tables of achievable matmul FLOPS (MAMF) and
                 of all-reduce bus bandwidth by size, on 8 H200 and on 4 x 8 B200
    [graphs]     developer.nvidia.com/blog/cuda-graphs: 0.9 us from one short kernel to the next
    [sfu]        CUDA C++ Programming Guide, arithmetic throughput: 16 special functions per clock
                 and multiprocessor; FlashAttention-3 (arXiv 2407.08608): 3.9e12 per second on H100
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..kinds import TransferKind
from .json_fields import Fields

VERSION = 3  # of the JSON form; a file of another version is refused

COLLECTIVE_KINDS = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE)
Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Rate:
    """So much per second, depending on how much there is to do.

    Attributes:
        peak: per second; flops, bytes or operations.
        achieved: ``(amount, fraction of the peak)`` in order of the amount. Below the first and
            above the last amount their fractions hold; in between time is interpolated.
    """

    peak: float
    achieved: Points

    def __post_init__(self) -> None:
        _check_positive("peak", self.peak)
        if not self.achieved:
            raise ValueError("achieved=(): give at least one (amount, fraction of the peak)")
        for amount, fraction in self.achieved:
            _check_positive("achieved", amount)
            _check_positive("achieved", fraction)
        for (less, slow), (more, fast) in zip(self.achieved, self.achieved[1:]):
            if less >= more or less / slow > more / fast:
                raise ValueError(
                    f"achieved: {(less, slow)} before {(more, fast)}: amounts must grow, and more "
                    "must not take less time"
                )

    def us(self, amount: float) -> float:
        """Time in microseconds; it never falls when ``amount`` grows."""
        points = self.achieved
        after = bisect_left(points, (amount,))
        if after == 0 or after == len(points):
            return amount / (self.peak * points[min(after, len(points) - 1)][1]) * 1e6
        (less, slow), (more, fast) = points[after - 1], points[after]
        share = (amount - less) / (more - less)
        return (less / slow * (1 - share) + more / fast * share) / self.peak * 1e6


@dataclass(frozen=True)
class Interconnect:
    """How ranks are connected.

    Attributes:
        latency_us: of a collective of nothing between two ranks.
        hop_us: what each step of a ring over this link adds to that.
        parcel_us: what another tensor adds to a coalesced collective.
        bus: bus bandwidth in bytes/s of each kind of collective, by bytes of the full buffer, as
            nccl-tests defines both (its doc/PERFORMANCE.md), with the latency taken off.
    """

    latency_us: float
    hop_us: float
    buffer_us: float
    bus: Mapping[TransferKind, Rate]

    def __post_init__(self) -> None:
        _check_positive("latency_us", self.latency_us, zero=True)
        _check_positive("hop_us", self.hop_us, zero=True)
        _check_positive("parcel_us", self.buffer_us, zero=True)
        for kind in COLLECTIVE_KINDS:
            if kind not in self.bus:
                raise ValueError(
                    f"bus has no {kind!r}: give the bandwidth of each of {COLLECTIVE_KINDS}"
                )


@dataclass(frozen=True)
class Hardware:
    """One device, and how it reaches the others.

    Attributes:
        name: of the device, or of the file's origin.
        flops: of matrix products per second by dtype: float32, tf32, bfloat16, float16, float8.
        memory: bytes read and written per second.
        host: bytes copied per second from the host's pinned memory, and as many to it.
        special_per_s: exponentials, error functions and the like per second.
        launch_us: what a kernel costs that does nothing.
        issue_us: what every collective costs compute, though it is hidden.
        contention: the part of a hidden collective's time that compute loses besides.
        ranks_per_node: ranks that ``intra`` connects; more than those use ``inter``.
    """

    name: str
    flops: Mapping[str, Rate]
    memory: Rate
    host: Rate
    special_per_s: float
    launch_us: float
    issue_us: float
    contention: float
    ranks_per_node: int
    intra: Interconnect
    inter: Interconnect

    def __post_init__(self) -> None:
        if "float32" not in self.flops:
            raise ValueError("flops has no 'float32': it stands in for dtypes that are not listed")
        _check_positive("special_per_s", self.special_per_s)
        _check_positive("launch_us", self.launch_us, zero=True)
        _check_positive("issue_us", self.issue_us, zero=True)
        _check_positive("contention", self.contention, zero=True)
        _check_positive("ranks_per_node", self.ranks_per_node)

    def flops_of(self, dtype: str) -> Rate:
        """Rate of matrix products; a dtype that is not listed runs as float32."""
        return self.flops.get(dtype, self.flops["float32"])

    def with_network(self, gbit_per_s: float) -> Hardware:
        """With another network between nodes: so many Gbit/s for each rank, one way.

        A ring that spans nodes runs once over each rank's network card, so the cards of a node add
        up, but no further than to what the links inside of the node carry.
        """
        _check_positive("gbit_per_s", gbit_per_s)
        line = self.ranks_per_node * gbit_per_s / 8 * 1e9
        bus = {kind: _network(line, self.intra.bus[kind]) for kind in COLLECTIVE_KINDS}
        return dataclasses.replace(self, inter=dataclasses.replace(self.inter, bus=bus))

    @classmethod
    def of_device(cls, name: str) -> Hardware:
        """The table's entry for ``torch.cuda.get_device_name()``, "cpu" or an entry's name.

        Raises:
            ValueError: there is none.
        """
        if name in HARDWARE:
            return HARDWARE[name]
        for pattern, entry in _DEVICES:
            if re.search(pattern, name) and not re.search("PCIE|NVL|MIG", name, re.IGNORECASE):
                return HARDWARE[entry]
        raise ValueError(
            f"hardware {name!r}: must be one of {sorted(HARDWARE)}, or a file that `python -m "
            "graphshard calibrate` wrote on such a machine"
        )

    @classmethod
    def for_device(cls, name: str) -> tuple[Hardware, str]:
        """As ``of_device``, but a device that is not in the table is taken for ``DEFAULT``.

        Returns:
            The entry, and the reason why it is not the device's own; "" where it is.
        """
        try:
            return cls.of_device(name), ""
        except ValueError:
            reason = f"{name!r} is not in the table of hardware: it is taken for {DEFAULT}"
            return HARDWARE[DEFAULT], reason

    def to_json(self) -> str:
        raw = {"version": VERSION, **dataclasses.asdict(self)}
        for name in ("intra", "inter"):
            raw[name] = {"parcel_us" if k == "buffer_us" else k: v for k, v in raw[name].items()}
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "hardware") -> Hardware:
        """The reverse of ``to_json``.

        Raises:
            ValueError: the text is not of this form. It names ``source`` and the field.
        """
        try:
            top = Fields(json.loads(text), "")
            if top.raw.get("version") != VERSION:
                raise ValueError(f"version is {top.raw.get('version')!r}: must be {VERSION}")
            return _hardware(top)
        except ValueError as error:  # JSONDecodeError is one
            raise ValueError(f"{source}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Hardware:
        """Read a file that ``calibrate`` wrote; raises as ``from_json``, and OSError."""
        return cls.from_json(path.read_text(), str(path))


def _check_positive(field: str, value: float, *, zero: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "0 or more" if zero else "more than 0"
        raise ValueError(f"{field}={value!r}: must be a finite number, {least}")


# --- reading JSON --------------------------------------------------------------------------------


def _rates(fields: Fields) -> dict[str, Rate]:
    return {name: _rate(fields, name) for name in fields.raw}


def _bus(fields: Fields) -> dict[TransferKind, Rate]:
    return {kind: _rate(fields, kind) for kind in COLLECTIVE_KINDS if kind in fields.raw}


def _rate(parent: Fields, key: str) -> Rate:
    fields = parent.object(key)
    pairs = fields.value("achieved", list, "a list of [amount, fraction]")
    for pair in pairs:
        if not isinstance(pair, list) or [type(x) in (int, float) for x in pair] != [True] * 2:
            raise ValueError(f"{fields.at('achieved')} has {pair!r}: must be two numbers")
    achieved = tuple((amount, fraction) for amount, fraction in pairs)
    return fields.built(Rate, peak=fields.number("peak"), achieved=achieved)


def _link(fields: Fields) -> Interconnect:
    names = {"latency_us": "latency_us", "hop_us": "hop_us", "buffer_us": "parcel_us"}
    numbers = {name: fields.number(key) for name, key in names.items()}
    return fields.built(Interconnect, **numbers, bus=_bus(fields.object("bus")))


def _hardware(fields: Fields) -> Hardware:
    return Hardware(
        name=fields.value("name", str, "a text"),
        flops=_rates(fields.object("flops")),
        memory=_rate(fields, "memory"),
        host=_rate(fields, "host"),
        special_per_s=fields.number("special_per_s"),
        launch_us=fields.number("launch_us"),
        issue_us=fields.number("issue_us"),
        contention=fields.number("contention"),
        ranks_per_node=fields.value("ranks_per_node", int, "a whole number"),
        intra=_link(fields.object("intra")),
        inter=_link(fields.object("inter")),
    )


# --- the table -----------------------------------------------------------------------------------

_MiB = float(1 << 20)
# [tuning]: 6.6 us to start, 0.6 us for a step over NVLink and 1.0 over PCIe. With 14 steps that
# makes 15 us for an all-reduce of 8 ranks, of which [mle] measured 18.
_BASE_US, _NVLINK_HOP_US, _PCIE_HOP_US = 6.6, 0.6, 1.0
# [mle]: 95 us for 32 KiB on 4 x 8 B200, that is 6 steps between nodes, less the 40 us of the rest.
# [tuning] has 2.7 (protocol LL) to 14 us (Simple).
_NETWORK_HOP_US = 9.0
# [mle]: what is achieved at a size, of what is at 16 GiB, with 18 us (8 ranks) and 95 us (32 ranks)
# taken off: both measured with all-reduce, taken for all kinds and generations.
_IN_A_NODE = ((1, 0.55), (4, 0.45), (16, 0.61), (64, 0.81), (256, 0.93), (1024, 0.97))
_BETWEEN_NODES = ((1, 0.08), (4, 0.13), (16, 0.24), (64, 0.61), (256, 0.79), (1024, 0.99))
# Not measured: NCCL puts the tensors of a group into few kernels, and the host prepares each.
_PARCEL_US = 20.0
_NETWORK_EFFICIENCY = 0.94  # [network]; [mle] has 376 of 400 GB/s for 8 cards of 400 Gb/s


def _ramp(line: float, full: float, shape: Points) -> Rate:
    return Rate(line, tuple((mib * _MiB, share * full) for mib, share in shape))


def _network(line: float, inside: Rate) -> Rate:
    within = inside.peak * inside.achieved[-1][1] / line
    return _ramp(line, min(_NETWORK_EFFICIENCY, within), _BETWEEN_NODES)


def _node(hop_us: float, line: float, ring: float, all_reduce: float) -> Interconnect:
    """A link inside of a node: bytes/s of the line, of NCCL's rings, and of its all-reduce."""
    rates = {kind: _ramp(line, ring / line, _IN_A_NODE) for kind in COLLECTIVE_KINDS}
    rates[TransferKind.ALL_REDUCE] = _ramp(line, all_reduce / line, _IN_A_NODE)
    return Interconnect(_BASE_US, hop_us, _PARCEL_US, rates)


def _flops(fraction: float, **tera: float) -> dict[str, Rate]:
    """Peaks by dtype in Tflops, dense, and the fraction of them that large products achieve."""
    return {dtype: Rate(peak * 1e12, ((1.0, fraction),)) for dtype, peak in tera.items()}


def _gpu(
    name: str, flops: dict[str, Rate], memory: Rate, host: Rate, special: float, node: Interconnect
) -> Hardware:
    # [graphs]: 0.9 us between kernels; the shortest take about 2 us themselves.
    network = Interconnect(_BASE_US, _NETWORK_HOP_US, _PARCEL_US, node.bus)
    # Judged: the host needs some 30 us to issue a collective, and NCCL's kernels take a few
    # multiprocessors and memory bandwidth.
    return Hardware(name, flops, memory, host, special, 3.0, 30.0, 0.05, 8, node, network)


# [mle]: MAMF in bf16 is 80 % of the peak on H100, the other dtypes are taken for that; fp8 71-73 %.
# FP32 without tensor cores: 47 of 60 Tflops on an H200 NVL (github.com/xzwgit/gpu-flops-bench).
_HOPPER = {
    **_flops(0.78, float32=66.9),
    **_flops(0.80, tf32=494.7, bfloat16=989.4, float16=989.4),
    **_flops(0.72, float8=1978.9),
}
# Line 900 GB/s both ways (H100 datasheet); [nvlink]; [mle] has 482 GB/s for all-reduce on H200.
_NVLINK4 = _node(_NVLINK_HOP_US, 450e9, 370e9, 480e9)
# A100 datasheet; [mle]: MAMF is 87 %. FP32: 17.7 Tflops are 94 % of cuBLAS (github.com/AG0708/sgBLAS).
_A100 = {
    **_flops(0.96, float32=19.5),
    **_flops(0.87, tf32=156.0, bfloat16=312.0, float16=312.0),
}
# Line 600 GB/s both ways (A100 datasheet). Rings: [topo], 12 links of 20 GB/s.
_NVLINK3 = _node(_NVLINK_HOP_US, 300e9, 240e9, 240e9)
# B200: DGX B200 datasheet, per GPU and dense; [mle]: MAMF is 78 % in bf16 and 76 % in fp8.
_B200 = {
    **_flops(0.78, float32=80.0, tf32=1125.0, bfloat16=2250.0, float16=2250.0),
    **_flops(0.76, float8=4500.0),
}
# Line 1.8 TB/s both ways (DGX B200). Rings: [topo], 18 links of 40.1 GB/s. All-reduce: [mle].
_NVLINK5 = _node(_NVLINK_HOP_US, 900e9, 722e9, 839e9)
# NVIDIA A10G datasheet for AWS. An 8192^3 product in bf16 measures 66.6 of 70 Tflops.
_A10G = {
    **_flops(0.90, float32=35.0),
    **_flops(0.95, tf32=35.0, bfloat16=70.0, float16=70.0),
}
# PCIe 4.0 x16 without peer access: 10 GB/s, as torch/_inductor/comm_analysis.py takes it.
_PCIE4 = _node(_PCIE_HOP_US, 32e9, 10e9, 10e9)


# One way over PCIe 4.0 and 5.0 x16, by the datasheets. Judged: four fifths are achieved.
_HOST4, _HOST5 = (Rate(line, ((1.0, 0.8),)) for line in (32e9, 64e9))


def _memory(bytes_per_s: float) -> Rate:
    # Copies reach 3.0 of 3.35 TB/s on an H100 and 4.3 of 4.8 on an H200; 0.90 for A100 also in
    # Calculon (github.com/calculon-ai/calculon, systems/a100_80g.json).
    return Rate(bytes_per_s, ((1.0, 0.90),))


def _cpu() -> Hardware:
    """One core and gloo over loopback: half of what one core of an AMD EPYC (Zen 4) measures.

    Measured: 104 Gflops in float32, 26 GB/s copied, 0.8e9 error functions per second, 300 us for a
    small collective of 2 ranks, and 0.7, 0.4 and 1.1 GB/s on the bus for 16 MiB; 0.05 and 1.5 ms for
    each further tensor of a coalesced gather and reduction. Assumed: 100 us for each further step.
    """
    flops = {
        "float32": Rate(104e9, ((1.0, 0.5),)),
        "bfloat16": Rate(104e9, ((1.0, 0.25),)),
        "float16": Rate(104e9, ((1.0, 0.25),)),
    }
    rates = {
        TransferKind.ALL_GATHER: 0.7e9,
        TransferKind.REDUCE_SCATTER: 0.4e9,
        TransferKind.ALL_REDUCE: 1.1e9,
    }
    bus = {kind: Rate(r, ((1.0, 0.5),)) for kind, r in rates.items()}
    loopback = Interconnect(300.0, 100.0, 800.0, bus)
    memory = Rate(26e9, ((1.0, 0.5),))
    # gloo copies and adds up in threads of its own, which take turns with compute on one core.
    host = Rate(13e9, ((1.0, 0.5),))  # what is copied is read and written
    return Hardware("cpu", flops, memory, host, 0.4e9, 5.0, 1500.0, 0.3, 8, loopback, loopback)


# Networks: 8 cards of 400 Gb/s in a DGX H100, H200 and B200, 8 of 200 Gb/s in a DGX A100 (their
# datasheets), 100 Gb/s for 8 GPUs in a g5.48xlarge (aws.amazon.com/ec2/instance-types/g5).
HARDWARE: dict[str, Hardware] = {
    entry.name: entry
    for entry in (
        _gpu("H100", _HOPPER, _memory(3.35e12), _HOST5, 3.9e12, _NVLINK4).with_network(400),
        _gpu("H200", _HOPPER, _memory(4.8e12), _HOST5, 3.9e12, _NVLINK4).with_network(400),
        _gpu("A100-40GB", _A100, _memory(1.555e12), _HOST4, 2.4e12, _NVLINK3).with_network(200),
        _gpu("A100-80GB", _A100, _memory(2.039e12), _HOST4, 2.4e12, _NVLINK3).with_network(200),
        _gpu("A10G", _A10G, _memory(0.6e12), _HOST4, 2.2e12, _PCIE4).with_network(12.5),
        _gpu("B200", _B200, _memory(8e12), _HOST5, 4.4e12, _NVLINK5).with_network(400),
        _cpu(),
    )
}
"""Datasheet rates of the SXM modules, with what of them is achieved. [sfu]: 2.4e12 special functions
per second are 108 multiprocessors of an A100 at 1.41 GHz, 2.2e12 80 of an A10G at 1.71 GHz, 4.4e12
148 of a B200 at 1.85 GHz."""

DEFAULT = "A100-80GB"
"""What stands in for a GPU that is not in the table: the middle of it."""

_DEVICES = (
    (r"\bH100\b", "H100"),
    (r"\bH200\b", "H200"),
    (r"\bA100\b.*40GB", "A100-40GB"),
    (r"\bA100\b.*80GB", "A100-80GB"),
    (r"\bA10G\b", "A10G"),
    (r"\bB200\b", "B200"),
)
