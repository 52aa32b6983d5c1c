"""The demo's chart: loss curves, and bars for speed and memory, one colour per training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .demo_report import rate
from .demo_training import HeldMemory, Settings, Training


def check_plot(path: Path) -> None:
    """Raise if the chart could not be written, before anything is trained.

    Raises:
        ValueError: matplotlib is not installed, the folder does not exist, or the suffix is not a
            format that matplotlib writes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            f"--plot {path}: matplotlib is not installed; pip install matplotlib, or leave it out"
        ) from None
    if not path.parent.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(f"--plot {path}: the name has to end in one of {', '.join(formats)}")


def plot(
    path: Path, trainings: Sequence[Training], held: Sequence[HeldMemory], settings: Settings
) -> None:
    """Write the chart.

    Args:
        held: memory of each training.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    curves, speeds, memory = figure.subplots(1, 3)
    names = [training.name for training in trainings]
    colors = [f"C{index}" for index in range(len(names))]
    # Equal curves cover each other: draw the first one wide, later ones thinner on top.
    for training, color, width in zip(trainings, colors, (6, 3, 1)):
        steps = range(1, len(training.losses) + 1)
        curves.plot(steps, training.losses, color=color, linewidth=width, label=training.name)
    curves.set(xlabel="step", ylabel="loss, mean of ranks", title="loss: on the same batches")
    curves.legend()

    rates = [rate(settings, training.seconds[settings.num_untimed :]) for training in trainings]
    speeds.bar(names, rates, color=colors)
    speeds.set(ylabel="tokens/s, median of steps", title="speed: more is better")

    bottom = [0.0] * len(names)
    for label, num_bytes, alpha in zip(
        ("parameters", "gradients", "AdamW state"), zip(*held), (1, 0.6, 0.3)
    ):
        heights = [value / 1e6 for value in num_bytes]
        bars = memory.bar(names, heights, bottom=bottom, color=colors, alpha=alpha)
        memory.bar_label(bars, labels=[label] * len(names), label_type="center", fontsize=8)
        bottom = [low + height for low, height in zip(bottom, heights)]
    memory.set(ylabel="MB per rank", title="memory: less is better")
    figure.savefig(path)
