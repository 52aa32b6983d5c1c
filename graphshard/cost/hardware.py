"""Rates of a machine (matrix products, memory, kernel launches, interconnects) and their JSON form.

``devices`` has a table of common GPUs and a CPU; ``calibrate`` measures a machine and writes the
JSON form.
"""

from __future__ import annotations

import dataclasses
import json
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..kinds import TransferKind

VERSION = 5  # version of the JSON form; files with another version are rejected

# Sources of rates: published numbers, or measurements of the machine itself.
DATASHEET, CALIBRATED = "datasheet", "calibrated"

# Collectives for which an interconnect has a rate; other kinds are priced at one of these rates.
COLLECTIVE_KINDS = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE)
ALL_TO_ALL = "all_to_all"  # a key of ``Interconnect.bus`` that may be missing

# Pairs of an amount of work and the fraction of a peak rate that it achieves.
Points = tuple[tuple[float, float], ...]


def _check_positive(field: str, value: float, *, zero: bool = False) -> None:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        least = "not negative" if zero else "positive"
        raise ValueError(f"{field}={value!r}: must be finite and {least}")


@dataclass(frozen=True)
class Rate:
    """A rate of work: a peak, and the fraction of it that each amount of work achieves.

    Attributes:
        peak: flops, bytes or operations per second.
        achieved: pairs ``(amount, fraction of the peak)``, by increasing amount. Fractions are
            constant below the first and above the last amount; in between, time is interpolated.

    Raises:
        ValueError: ``achieved`` is empty or not by increasing amount, a number is not positive and
            finite, or a larger amount would take less time.
    """

    peak: float
    achieved: Points

    def __post_init__(self) -> None:
        _check_positive("peak", self.peak)
        if not self.achieved:
            raise ValueError("achieved=(): pass at least one (amount, fraction of the peak) pair")
        for amount, fraction in self.achieved:
            _check_positive("achieved", amount)
            _check_positive("achieved", fraction)
        for (less, slow), (more, fast) in zip(self.achieved, self.achieved[1:]):
            # ``fit_rate`` makes times equal, up to rounding.
            if less >= more or less / slow > more / fast * (1 + 1e-9):
                raise ValueError(
                    f"achieved: {(less, slow)} before {(more, fast)}: amounts must grow, and a "
                    "larger amount must not take less time"
                )

    @property
    def largest(self) -> float:
        return self.peak * self.achieved[-1][1]

    def us(self, amount: float) -> float:
        """Return the time for ``amount`` in microseconds; larger amounts never take less time."""
        points = self.achieved
        after = bisect_left(points, (amount,))
        if after == 0 or after == len(points):
            return amount / (self.peak * points[min(after, len(points) - 1)][1]) * 1e6
        (less, slow), (more, fast) = points[after - 1], points[after]
        share = (amount - less) / (more - less)
        return (less / slow * (1 - share) + more / fast * share) / self.peak * 1e6


# Default rate of host memory for each of 8 GPUs, in bytes read and written per second. Assumed: two
# sockets with 8 channels of DDR4-3200 each, as in a DGX A100 (2 x EPYC 7742), at half their peak,
# because fused optimizers read and write four tensors at once while the data loader runs. One core
# per process reaches this rate: a core of an AMD EPYC (Zen 4) runs a fused AdamW at 54 GB/s.
HOST_MEMORY = Rate(409.6e9 / 8, ((1.0, 0.5),))


@dataclass(frozen=True)
class Interconnect:
    """Latency and bandwidth of collectives over one kind of link between ranks.

    Raises:
        ValueError: a time is negative or not finite, or ``bus`` lacks one of ``COLLECTIVE_KINDS``.
    """

    latency_us: float  # fixed time of a collective, excluding ring steps and bytes
    hop_us: float  # added time per ring step over this link
    buffer_us: float  # added time per tensor after the first in a coalesced collective
    # Bus bandwidth in bytes/s of each kind of collective, by size of the full buffer, as defined by
    # nccl-tests (doc/PERFORMANCE.md), but without ``latency_us`` in the time. The bandwidth of
    # ``ALL_TO_ALL`` counts only the bytes that travel over this kind of link; if missing, it is
    # derived from that of a reduce-scatter.
    bus: Mapping[str, Rate]

    def __post_init__(self) -> None:
        _check_positive("latency_us", self.latency_us, zero=True)
        _check_positive("hop_us", self.hop_us, zero=True)
        _check_positive("buffer_us", self.buffer_us, zero=True)
        for kind in COLLECTIVE_KINDS:
            if kind not in self.bus:
                raise ValueError(
                    f"bus lacks {kind!r}: pass the bandwidth of each of {COLLECTIVE_KINDS}"
                )


@dataclass(frozen=True)
class Hardware:
    """Rates of one device and of its interconnects to other devices.

    Raises:
        ValueError: a value is out of range, or ``flops`` lacks float32.
    """

    name: str  # name of the device, or origin of the file
    # Operations per second of matrix products, by dtype: float32, tf32, bfloat16, float16, float8.
    flops: Mapping[str, Rate]
    memory: Rate  # bytes read and written per second in device memory
    host: Rate  # bytes copied per second between pinned host memory and the device, per direction
    special_per_s: float  # exponentials, error functions and similar functions per second
    launch_us: float  # time of an empty kernel
    issue_us: float  # compute time lost to the launch of each collective, even if hidden
    contention: float  # further compute time lost to a hidden collective, as a fraction of its time
    ranks_per_node: int  # number of ranks in a node
    intra: Interconnect  # between the ranks of a node
    inter: Interconnect  # between nodes; used by groups that span several
    device_type: str = "cuda"  # or "cpu"
    source: str = DATASHEET  # or ``CALIBRATED``
    # Bytes that an optimizer reads and writes per second in host memory, per device.
    host_memory: Rate = HOST_MEMORY

    def __post_init__(self) -> None:
        _check_one_of("device_type", self.device_type, ("cuda", "cpu"))
        _check_one_of("source", self.source, (DATASHEET, CALIBRATED))
        if "float32" not in self.flops:
            raise ValueError(
                "flops lacks 'float32', the fallback for dtypes that are not listed: pass its rate"
            )
        _check_positive("special_per_s", self.special_per_s)
        _check_positive("launch_us", self.launch_us, zero=True)
        _check_positive("issue_us", self.issue_us, zero=True)
        _check_positive("contention", self.contention, zero=True)
        _check_positive("ranks_per_node", self.ranks_per_node)

    def flops_of(self, dtype: str) -> Rate:
        return self.flops.get(dtype, self.flops["float32"])

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "hardware") -> Hardware:
        """Parse the result of ``to_json``.

        Raises:
            ValueError: ``text`` is malformed or of another version; the message begins with
                ``source``.
        """
        try:
            raw = json.loads(text)
            if isinstance(raw, dict) and raw.get("version") != VERSION:
                raise ValueError(
                    f"version {raw.get('version')!r}: this graphshard reads version {VERSION}; run "
                    "`python -m graphshard calibrate` again"
                )
            hardware: Hardware = _decode(cls, raw, "")
            return hardware
        except (ValueError, OverflowError) as error:  # includes JSONDecodeError
            raise ValueError(f"{source}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Hardware:
        """Read a file that ``calibrate`` wrote; raise a ValueError or OSError if that fails."""
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: is not UTF-8 text: pass a file that `python -m graphshard calibrate` "
                "wrote"
            ) from error
        return cls.from_json(text, str(path))


def _check_one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field}={value!r}: must be one of {choices}")


# --- the JSON form -------------------------------------------------------------------------------

_SCALARS: dict[Any, str] = {float: "a number", int: "an integer", str: "a string"}


def _decode(kind: Any, raw: Any, path: str) -> Any:
    """Convert the JSON value ``raw`` to the type ``kind``.

    Args:
        kind: dataclass, mapping, ``Points`` or scalar type.
        path: keys that lead to ``raw`` in the file, as in "intra.bus"; "" for the top level.
    """
    if kind in _SCALARS:
        allowed = (int, float) if kind is float else (kind,)
        return _checked(raw, allowed, path, _SCALARS[kind])
    if kind == Points:
        for pair in _checked(raw, (list,), path, "a list of [amount, fraction]"):
            if not isinstance(pair, list) or [type(x) in (int, float) for x in pair] != [True] * 2:
                raise ValueError(f"{path} contains {pair!r}: must be a pair of numbers")
        return tuple(map(tuple, raw))
    _checked(raw, (dict,), path or "the top level", "a JSON object")
    prefix = f"{path}." if path else ""
    if not dataclasses.is_dataclass(kind):
        name_type, value_type = get_args(kind)
        return {name_type(k): _decode(value_type, v, f"{prefix}{k}") for k, v in raw.items()}
    types, values = get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        key = field.name
        if key in raw:
            values[key] = _decode(types[key], raw[key], f"{prefix}{key}")
        elif field.default is dataclasses.MISSING:
            raise ValueError(
                f"{prefix}{key} is missing: add it, or run `python -m graphshard calibrate` again"
            )
    build: Any = kind
    try:
        return build(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error


def _checked(raw: Any, types: tuple[type, ...], path: str, description: str) -> Any:
    if type(raw) not in types:  # not isinstance: a bool is not a number
        raise ValueError(f"{path} is {raw!r}: must be {description}")
    return raw
