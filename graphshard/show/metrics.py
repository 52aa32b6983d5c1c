"""Metrics of compiled graphs, for a logger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..kinds import GraphKind, TransferKind
from .dump import Dump


def metrics(dumps: Sequence[Dump]) -> dict[str, float]:
    """Return metrics of the training graphs in ``dumps``; each graph counts once.

    Times are predicted, in microseconds; exposed time includes waits for collectives that the model
    itself calls. Sizes are in bytes: the largest planned live memory of a graph, and for each kind
    of transfer the total size of its full buffers, as in the tables.
    """
    training = [dump for dump in dumps if dump.plan.graph != GraphKind.INFERENCE]
    totals = [dump.totals for dump in training]
    num_bytes = Counter[TransferKind]()
    for bucket in (bucket for dump in training for bucket in dump.plan.buckets):
        num_bytes[bucket.kind] += bucket.num_bytes
    total_us = sum(one.total_us for one in totals)
    exposed_us = sum(one.all_exposed_us for one in totals)
    return {
        "predicted_us": total_us,
        "predicted_compute_us": sum(one.compute_us for one in totals),
        "predicted_communication_us": sum(one.communication_us for one in totals),
        "predicted_exposed_us": exposed_us,
        "predicted_exposure": exposed_us / total_us if total_us else 0.0,
        "predicted_peak_bytes": max((one.peak_bytes for one in totals), default=0),
        **{f"{kind}_bytes": num_bytes[kind] for kind in TransferKind},
    }
