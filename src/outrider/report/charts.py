"""The charts of a judged run, each as one SVG for a page.

Owns the drawing; every chart is small enough for a phone and carries a caption with what it holds
for. Reads :mod:`outrider.bench.judgement`; a chart without data is not drawn, and says why.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.bench.judgement import ArmAtLoad, Judgement
from outrider.bench.metrics import pooled
from outrider.bench.records import Load
from outrider.bench.verdict import Cell, Verdict
from outrider.errors import FailureError
from outrider.report.tables import workload_title

COLOURS = ("#0b5fa5", "#c2570c", "#3a7d34", "#7b3fa0", "#9a7d0a", "#b0306a", "#2a7f86")
PLAIN_COLOUR = "#555555"
MARKERS = "osD^vPX"
WIDTH, HEIGHT = 4.6, 3.1  # inches; at 400 pixels a page shows it at its own size
_DISTRIBUTIONS = {
    "ttft_s": "from when a request was due to its first text",
    "chunk_gap_s": "between neighbouring chunks, however many tokens they hold, so drafting makes "
    "fewer and longer ones",
}
WIDE_RATIO = 4.0  # highest over lowest end of an interval from which ratios are drawn by logarithm
LOG_FROM = 20.0  # largest over smallest time from which a linear axis hides the small ones
ONE_DECADE_TICKS_FROM = 300.0  # of largest over smallest: more ticks would touch
LEGEND_CHARS = 34  # of four names in one row
MAX_POINTS = 200  # of a distribution: more are not seen, only loaded
# What a page has no use for; groups are numbered alike in every chart, and ids must not repeat.
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_GROUP_ID = re.compile(r'(<g) id="[^"]*"')


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture with its words; ``svg`` is None where there was nothing to draw."""

    title: str
    caption: str
    svg: str | None


def charts(judgement: Judgement) -> list[Chart]:
    """All charts in the page's order.

    Raises:
        FailureError: matplotlib is not installed.
    """
    where = conditions_line(judgement)
    drawn = [_ratio_chart(judgement, where)]
    drawn += [
        _distribution_chart(judgement, load, name, words, where)
        for load in judgement.data.run.loads
        for name, words in (("ttft_s", "time to first token"), ("chunk_gap_s", "chunk gap"))
    ]
    drawn += [
        _position_chart(judgement, where),
        _category_chart(judgement, where),
        _time_chart(judgement, where),
        *_projection_charts(judgement, where),
    ]
    return drawn


def conditions_line(judgement: Judgement) -> str:
    """What every figure of the run holds for, in one line; loads and methods are said beside it."""
    cells: Sequence[Cell] = judgement.cells
    speedup = next((cell.speedup for cell in cells if cell.speedup is not None), None)
    words = [workload_title(judgement)]
    if speedup is not None:
        found = speedup.conditions
        precision = "precision unknown" if found.precision == "unknown" else found.precision
        engine = f"{found.engine} {found.engine_version}, {precision}"
        words += [found.sampling, engine, found.machine]
    return "; ".join(words)


def _ratio_chart(judgement: Judgement, where: str) -> Chart:
    """Ratio with interval over load, one line per method; invalid cells are left out."""
    run, margin = judgement.data.run, judgement.settings.margin
    arms = [arm for arm in run.arms if not arm.is_baseline]
    valid = [c for c in judgement.cells if c.verdict is not Verdict.INVALID and c.speedup]
    metrics = ", ".join(dict.fromkeys(str(cell.metric) for cell in valid))
    caption = (
        f"Each method's {metrics} over that of plain decoding ({run.baseline.name}), with the "
        "intervals of the verdict; above the dashed line a gain exceeds the margin of "
        f"{margin:.0%}. Measured on {where}."
    )

    def draw(axes: Any) -> None:
        places = {load: place for place, load in enumerate(run.loads)}
        for index, arm in enumerate(arms):
            mine = [cell for cell in valid if cell.arm.name == arm.name]
            shift = 0.12 * (index - (len(arms) - 1) / 2)
            x = [places[cell.load] + shift for cell in mine]
            points = [cell.speedup.point() for cell in mine if cell.speedup is not None]
            y = [ratio for ratio, _, _ in points]
            below = [ratio - (low or ratio) for ratio, low, _ in points]
            above = [(high or ratio) - ratio for ratio, _, high in points]
            style: dict[str, Any] = {"color": _colour(index), "marker": MARKERS[index % 7]}
            axes.errorbar(x, y, (below, above), capsize=3, ms=4, lw=1, label=arm.name, **style)
        axes.axhline(1.0, color="#000000", lw=0.8)
        axes.axhline(1.0 + margin, color="#000000", lw=0.6, ls="--")
        ends = [end for cell in valid if cell.speedup for end in cell.speedup.point() if end]
        if max(ends) > WIDE_RATIO * min(ends):  # one wide interval would press the others flat
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(_log_locator(max(ends) / min(ends)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        axes.set_xticks(range(len(run.loads)), [f"{load.value:g}" for load in run.loads])
        axes.set_xlim(-0.5, len(run.loads) - 0.5)  # also the loads at which nothing is valid
        _label(axes, _load_unit(run.loads), f"ratio to {run.baseline.name}")
        _legend(axes)

    svg = _svg("ratio", draw) if valid else None
    return Chart("Ratio over load", caption if valid else "No valid comparison.", svg)


def _distribution_chart(
    judgement: Judgement, load: Load, name: str, words: str, where: str
) -> Chart:
    """Share of samples up to a time, per arm: the whole distribution, tails included."""
    entries = [entry for entry in judgement.arms if entry.load == load]
    samples = {entry.arm.name: sorted(pooled(entry.blocks, name)) for entry in entries}
    filled = {arm: values for arm, values in samples.items() if values}
    colours = _arm_colours(judgement)

    def draw(axes: Any) -> None:
        for arm, values in filled.items():
            share = np.linspace(0.0, 1.0, min(MAX_POINTS, max(2, len(values))))
            axes.plot(np.quantile(values, share) * 1000, share, color=colours[arm], lw=1.2,
                      label=arm)  # fmt: skip
        least, most = (end(pick[i] for pick in filled.values()) for end, i in ((min, 0), (max, -1)))
        if least > 0.0 and most > LOG_FROM * least:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(_log_locator(most / least))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
        _label(axes, f"{words}, milliseconds", "share of samples at most so long")
        _legend(axes)

    counts = ", ".join(f"{arm} {len(values)}" for arm, values in filled.items())
    caption = f"At {load.text}; {_DISTRIBUTIONS[name]}; samples: {counts}. Measured on {where}."
    svg = _svg(f"{name}-{load.name}", draw) if filled else None
    title = f"{words[0].upper()}{words[1:]} at {load.text}"
    return Chart(title, caption if filled else "No sound request.", svg)


def _position_chart(judgement: Judgement, where: str) -> Chart:
    """Marginal acceptance by position, one line per method, at the first load that has it."""
    chosen = _first_with(judgement, lambda entry: entry.acceptance and entry.acceptance.marginal)
    colours = _arm_colours(judgement)

    def draw(axes: Any) -> None:
        for entry in chosen:
            found = entry.acceptance
            rates = () if found is None else found.marginal or ()
            axes.plot(range(1, len(rates) + 1), rates, color=colours[entry.arm.name], lw=1.2,
                      marker=".", label=entry.arm.name)  # fmt: skip
        axes.set_ylim(0.0, 1.0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _label(axes, "position in the draft", "steps that accepted it / steps")
        _legend(axes)

    caption = (
        f"{_loads_of(chosen)}. The points of a line add up to its acceptance length less one. "
        f"Measured on {where}."
    )
    return _or_unavailable("Acceptance by position", caption, "acceptance-position", draw, chosen)


def _category_chart(judgement: Judgement, where: str) -> Chart:
    """Acceptance length by category of prompt, one bar per method."""
    chosen = _first_with(
        judgement,
        lambda entry: any(found.length for found in entry.acceptance_by_category.values()),
    )
    colours = _arm_colours(judgement)
    names = sorted({name for entry in chosen for name in entry.acceptance_by_category})

    def draw(axes: Any) -> None:
        height = 0.8 / len(chosen)
        for index, entry in enumerate(chosen):
            found = entry.acceptance_by_category
            y = [place + height * (index - (len(chosen) - 1) / 2) for place in range(len(names))]
            lengths = [(found[name].length or 0.0) if name in found else 0.0 for name in names]
            axes.barh(y, lengths, height, color=colours[entry.arm.name], label=entry.arm.name)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.axvline(1.0, color="#000000", lw=0.8)
        _label(axes, "acceptance length", "")
        _legend(axes)

    caption = (
        f"{_loads_of(chosen)}; tokens per verify step, the bonus token included. 1, the line, is "
        f"plain decoding. Measured on {where}."
    )
    tall = HEIGHT + 0.12 * max(0, len(names) * len(chosen) - 12)
    return _or_unavailable(
        "Acceptance by category", caption, "acceptance-category", draw, chosen, height=tall
    )


def _time_chart(judgement: Judgement, where: str) -> Chart:
    """Where the steps' time went, one bar per arm and load."""
    chosen = [entry for entry in judgement.arms if entry.time_split is not None]
    parts = list(
        dict.fromkeys(
            part for e in chosen if e.time_split is not None for part in e.time_split.seconds
        )
    )

    def draw(axes: Any) -> None:
        left = np.zeros(len(chosen))
        for index, part in enumerate(parts):
            shares = np.array(
                [e.time_split.shares.get(part, 0.0) if e.time_split else 0.0 for e in chosen]
            )
            axes.barh(range(len(chosen)), shares, left=left, color=_colour(index), label=part)
            left += shares
        names = [f"{entry.arm.name}, {entry.load.text}" for entry in chosen]
        axes.set_yticks(range(len(chosen)), names)
        axes.invert_yaxis()
        _label(axes, "share of the time in steps", "")
        _legend(axes)

    caption = (
        "As the servers count it. Prefill: reading prompts; draft: guessing; verify: the target's "
        f"pass over the last token and the drafts, in plain decoding over the last token alone. "
        f"Measured on {where}."
    )
    tall = HEIGHT + 0.14 * max(0, len(chosen) - 10)
    return _or_unavailable("Where a step's time goes", caption, "time", draw, chosen, height=tall)


def _projection_charts(judgement: Judgement, where: str) -> Iterator[Chart]:
    """Decode-phase ratio: the fitted line, the loads it was fitted on, those it was checked on."""
    for name, projection in judgement.projections.items():
        title = f"Projection against measurement, {name}"
        if not projection.is_shown:
            yield Chart(title, f"Not shown: {projection.reason}.", None)
            continue
        ratios, at = projection.ratios, projection.at

        def draw(axes: Any, ratios: Mapping[int, Any] = ratios, at: Callable = at) -> None:
            users = np.geomspace(min(ratios), max(ratios), 60)
            users = np.clip(users, min(ratios), max(ratios))
            axes.plot(users, [at(each) for each in users], color=_colour(0), lw=1.2, label="model")
            for is_held_out, words, fill in ((False, "fitted on", "full"), (True, "check", "none")):
                points = [(n, seen) for n, (seen, _, held) in ratios.items() if held == is_held_out]
                axes.plot(*zip(*points, strict=True), "o", fillstyle=fill, ms=6, label=words,
                          color=_colour(1))  # fmt: skip
            axes.axhline(1.0, color="#000000", lw=0.8)
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(ratios), [str(n) for n in ratios])
            axes.minorticks_off()
            _label(axes, "users", "decode-phase ratio, from TPOT")
            _legend(axes)

        worst = max(abs(math.log(told / seen)) for seen, told, held in ratios.values() if held)
        caption = (
            f"{name}; on the loads that it was not fitted on the model is off by at most "
            f"{worst:.1%}. The ratio is that of decoding alone; nothing is drawn beyond the loads "
            f"measured. Measured on {where}."
        )
        yield Chart(title, caption, _svg(f"projection-{name}", draw))


def _or_unavailable(
    title: str,
    caption: str,
    name: str,
    draw: Callable[[Any], None],
    chosen: Sequence[ArmAtLoad],
    *,
    height: float = HEIGHT,
) -> Chart:
    if not chosen:
        return Chart(title, "Unavailable: no server tells.", None)
    return Chart(title, caption, _svg(name, draw, height=height))


def _first_with(judgement: Judgement, has: Callable[[ArmAtLoad], object]) -> list[ArmAtLoad]:
    """Per speculative arm its first load that has a figure."""
    found: dict[str, ArmAtLoad] = {}
    for entry in judgement.arms:
        if not entry.arm.is_baseline and entry.arm.name not in found and has(entry):
            found[entry.arm.name] = entry
    return list(found.values())


def _loads_of(entries: Sequence[ArmAtLoad]) -> str:
    return "At " + ", ".join(dict.fromkeys(entry.load.text for entry in entries))


def _arm_colours(judgement: Judgement) -> dict[str, str]:
    arms = [arm.name for arm in judgement.data.run.arms if not arm.is_baseline]
    plain = {judgement.data.run.baseline.name: PLAIN_COLOUR}
    return plain | {name: _colour(index) for index, name in enumerate(arms)}


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _load_unit(loads: Sequence[Load]) -> str:
    units = {"users" if load.concurrency is not None else "requests/s" for load in loads}
    return " or ".join(sorted(units, reverse=True))


def _label(axes: Any, across: str, up: str) -> None:
    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(up, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)  # the grid behind the bars
    axes.grid(alpha=0.3, lw=0.4)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(axes: Any) -> None:
    """Above the axes, where it hides no line."""
    names = axes.get_legend_handles_labels()[1]
    columns = 4 if len(names) <= 4 and sum(map(len, names)) <= LEGEND_CHARS else 3
    axes.figure.legend(fontsize=8, loc="outside upper center", ncols=columns, frameon=False)


def _log_locator(ratio: float) -> Any:
    """1, 2 and 5 of every decade where there is room for them."""
    from matplotlib.ticker import LogLocator

    return LogLocator(subs=(1.0, 2.0, 5.0) if ratio < ONE_DECADE_TICKS_FROM else (1.0,))


def _svg(name: str, draw: Callable[[Any], None], *, height: float = HEIGHT) -> str:
    """One drawing as an SVG element: no prolog, no metadata, ids that no other chart has."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise FailureError(
            "the page's charts need matplotlib, which is not installed: "
            "pip install 'outrider[bench]'"
        ) from None
    # Text stays text: it can be read, searched and scaled. The salt makes clip paths unique.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    text = out.getvalue()
    return _GROUP_ID.sub(r"\1", _METADATA.sub("", text[text.index("<svg") :]))
