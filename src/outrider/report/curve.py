"""The picture of a training run: acceptance length over time, accuracy by step, loss.

Owns the drawing only; the figures are those of a run folder's ``log.jsonl`` and ``times.jsonl``
(:mod:`outrider.training.log`), handed in as plain values. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import FailureError

_COLOURS = ("#0b5fa5", "#c2570c", "#3a7d34", "#7b3fa0", "#9a7d0a", "#555555", "#b0306a")


def draw_curve(
    log: Sequence[Mapping[str, Any]],
    times: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    title: str,
) -> None:
    """Write the run as one SVG file.

    Args:
        log: lines with ``step``, and ``losses``, ``accuracy``, ``acceptance``, or ``validation``
            with the same inside.
        times: lines with ``step`` and ``seconds``.
        path: of the picture; written whole or not at all.
        title: in one line, what was trained on what.

    Raises:
        FailureError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise FailureError(
            "the picture needs matplotlib, which is not installed: pip install 'outrider[train]'"
        ) from None
    minutes = {int(line["step"]): float(line["seconds"]) / 60 for line in times}
    learnt = [line for line in log if "losses" in line]
    looked = [(line["step"], line["validation"]) for line in log if "validation" in line]
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    figure.suptitle(title, fontsize=9)
    tau, accuracy, loss = figure.subplots(1, 3)
    reached = [(minutes[step], found["acceptance"]) for step, found in looked if step in minutes]
    tau.plot(*_columns(reached), color=_COLOURS[0], marker=".")
    _label(tau, "minutes of training", "acceptance length, predicted, held out")
    num_steps = max((len(found["accuracy"]) for _, found in looked), default=0)
    for k in range(num_steps):
        points = [(step, found["accuracy"][k]) for step, found in looked]
        accuracy.plot(*_columns(points), color=_COLOURS[k % len(_COLOURS)], label=f"{k + 1}")
    _label(accuracy, "steps", "agreement with the target, held out")
    if num_steps:
        accuracy.legend(title="tokens ahead", fontsize=6, title_fontsize=6)
    loss.plot(*_columns([(line["step"], line["losses"][0]) for line in learnt]), lw=0.5, alpha=0.5)
    loss.plot(*_columns([(step, found["losses"][0]) for step, found in looked]), color=_COLOURS[1])
    _label(loss, "steps", "loss, first step (thin: training)")
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="svg", metadata={"Date": None})
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise FailureError(f"{path}: cannot be written: {error.strerror or error}") from None


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _label(axes: Any, across: str, up: str) -> None:
    axes.set_xlabel(across, fontsize=7)
    axes.set_ylabel(up, fontsize=7)
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3, lw=0.4)
