"""Links that this machine does not have.

``with_wire`` describes a modelled wire to the planner; ``modelled_links`` and ``tests.recording``
run collectives on one. ``between_namespaces`` joins two network namespaces by a real link of
limited bandwidth.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from graphshard.cost.hardware import COLLECTIVE_KINDS, Hardware, Interconnect, Rate
from graphshard.kinds import TransferKind

NAMESPACES = ("graphshard0", "graphshard1")
_PORT = "29583"


class Wire(NamedTuple):
    """A modelled wire, by its latency and bandwidth."""

    alpha_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        """Return the time of a collective whose full buffers have ``num_bytes`` in total."""
        return self.alpha_s + num_bytes / self.bytes_per_s

    def __str__(self) -> str:
        """Return the latency and the bandwidth, with units."""
        return f"{self.alpha_s * 1e3:g} ms and {self.bytes_per_s / 1e9:g} GB/s"


def with_wire(base: Hardware, wire: Wire, world: int) -> Hardware:
    """Return ``base`` with a modelled wire between all ranks.

    A collective takes the latency of the wire plus the time of all bytes of its full buffer.

    Args:
        world: number of ranks.
    """
    share = (world - 1) / world  # fraction of a buffer that a ring moves; an all-reduce twice
    bus = {
        kind: Rate(
            wire.bytes_per_s * share * (2 if kind == TransferKind.ALL_REDUCE else 1), ((1.0, 1.0),)
        )
        for kind in COLLECTIVE_KINDS
    }
    link = Interconnect(wire.alpha_s * 1e6, 0.0, base.intra.buffer_us, bus)
    return dataclasses.replace(base, name="wire", intra=link, inter=link)


def write_with_wire(base: Hardware, wire: Wire, world: int, folder: str) -> str:
    """Write :func:`with_wire` to ``folder``; return the path, for ``SchedulePolicy.hardware``."""
    path = Path(folder, "wire.json")
    path.write_text(with_wire(base, wire, world).to_json())
    return str(path)


def between_namespaces(command: Sequence[str], gbit: float, timeout_s: float = 900.0) -> None:
    """Run ``command`` as two ranks in network namespaces, joined by a link of ``gbit`` Gb/s.

    Raises:
        SystemExit: this machine cannot make such a link, or a rank failed.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        sys.exit("--link-gbit: needs Linux and root, for network namespaces; see --wire")
    try:
        _shape(gbit)
        environ = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "10.83.0.1"}
        environ |= {"MASTER_PORT": _PORT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "gs0"}
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank, name in enumerate(NAMESPACES)
        ]
        statuses = [process.wait(timeout_s) for process in processes]
        if any(statuses):
            sys.exit(f"--link-gbit: ranks ended with {statuses}")
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        sys.exit(f"--link-gbit: this machine cannot make such a link: {reason}; see --wire")
    finally:
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _shape(gbit: float) -> None:
    """Create two namespaces and a pair of interfaces, with a token bucket filter at both ends."""

    def run(*args: str) -> None:
        subprocess.run(args, check=True, capture_output=True, text=True)

    for name in NAMESPACES:
        run("ip", "netns", "add", name)
    pair = ["ip", "link", "add", "gs0", "netns", NAMESPACES[0], "type", "veth", "peer"]
    run(*pair, "name", "gs0", "netns", NAMESPACES[1])
    for rank, name in enumerate(NAMESPACES):
        inside = ["ip", "-n", name]
        run(*inside, "address", "add", f"10.83.0.{rank + 1}/24", "dev", "gs0")
        for device in ("lo", "gs0"):
            run(*inside, "link", "set", device, "up")
        limits = ["rate", f"{gbit}gbit", "burst", "1mb", "latency", "50ms"]
        run("tc", "-n", name, "qdisc", "add", "dev", "gs0", "root", "tbf", *limits)


def parse_wire(text: str) -> Wire:
    """Parse an argument "ALPHA_MS,GB_PER_S", as in "4,1"."""
    try:
        alpha_ms, gb_per_s = map(float, text.split(","))
        if alpha_ms < 0 or gb_per_s <= 0:
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be milliseconds and GB/s, as in 4,1"
        ) from None
    return Wire(alpha_s=alpha_ms / 1e3, bytes_per_s=gb_per_s * 1e9)


def add_planned_wire(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--planned-wire`` (in older results ``--told``)."""
    text = "wire to plan for; default: the wire that steps run on"
    metavar = "ALPHA_MS,GB_PER_S"
    parser.add_argument("--planned-wire", type=parse_wire, metavar=metavar, help=text)
    hidden = argparse.SUPPRESS
    parser.add_argument("--told", dest="planned_wire", type=parse_wire, default=hidden, help=hidden)


def positive(text: str) -> float:
    """Parse a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: must be more than 0")
    return value
