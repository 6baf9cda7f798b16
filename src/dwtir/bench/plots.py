"""Pictures of results: speed-ups, the roofline, and the ladder from naive to tuned."""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import ArgumentError
from ..kernel import Timing
from ..tune.plot import require_matplotlib
from .articles import PUBLISHED_US, TABLES, TUNED, Case
from .results import Results
from .row import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_PALETTE = 16
"""Colours of a PNG file, which with all of them is four times as large."""

_SUFFIXES = (".png", ".svg", ".pdf")
_BARS = 10
_FORMS = 4
_WIDTH = 7.0
_HEIGHT = 4.5
_BAR_HEIGHT = 0.16
_OURS, _PEERS = "#1f6fb4", "#9a9a9a"
_COLOURS = ("#1f6fb4", "#e08a1e", "#3a923a", "#c03d3e", "#7a5fa8", "#6b4c3b")

_LADDER = next(table for table in TABLES if any(case.way == TUNED for case in table.lines))

_Draw: TypeAlias = Callable[["Axes"], None]


def check_path(path: Path) -> None:
    """Check that plots can be drawn there."""
    if path.suffix not in (*_SUFFIXES, "") and not path.is_dir():
        raise ArgumentError(f"a plot is a folder or a file that ends in {', '.join(_SUFFIXES)}, got {path}")
    require_matplotlib()


def plot(
    results: Results, path: Path, *, prefix: str = "", source: str = "", only: Sequence[str] | None = None
) -> list[str]:
    """Draw what there is to draw.

    It goes into a file, or as PNG files whose names have the prefix into a folder, with a note
    of their source. A line is returned for each file, and for each panel left out.
    """
    check_path(path)
    drawings, lines = _panels(results)
    if only is not None:
        drawings, lines = {name: drawings[name] for name in only}, []
    if path.suffix in _SUFFIXES:
        files = {path: drawings} if drawings else {}
    else:
        files = {path / f"{prefix}{name}.png": {name: drawings[name]} for name in drawings}
    for file, drawn in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        _figure(results, list(drawn.values())).savefig(file)
        if file.suffix == ".png":
            _take_palette(file, source)
    return [f"wrote {file}" for file in files] + lines


def _take_palette(file: Path, source: str) -> None:
    from PIL import Image, PngImagePlugin

    notes = PngImagePlugin.PngInfo()
    if source:
        notes.add_text("Description", source)
    with Image.open(file) as image:
        few = image.convert("RGB").quantize(_PALETTE, dither=Image.Dither.NONE)
    few.save(file, pnginfo=notes, optimize=True)


def panels(results: Results) -> list[str]:
    """Name what there is to draw: of speedup, roofline and ladder."""
    return list(_panels(results)[0])


def _figure(results: Results, drawn: list[tuple[float, _Draw]]) -> "Figure":
    from matplotlib.figure import Figure

    (first, draw_first), *others = drawn
    height = max(first, sum(height for height, _ in others))
    columns = 2 if others else 1
    figure = Figure(figsize=(_WIDTH * columns, height), dpi=72, layout="constrained")
    grid = figure.add_gridspec(max(1, len(others)), columns)
    draw_first(figure.add_subplot(grid[:, 0]))
    for number, (_, draw) in enumerate(others):
        draw(figure.add_subplot(grid[number, 1]))
    figure.suptitle(f"{results.target.name}, dwtir {results.about.get('dwtir', '')}", fontsize=10)
    return figure


def _panels(results: Results) -> tuple[dict[str, tuple[float, _Draw]], list[str]]:
    found: dict[str, tuple[float, _Draw]] = {}
    left = []
    bars = _bars([row for row in results.rows if row.ratio() is not None])
    if bars:
        shown = dict(islice(bars.items(), _BARS))
        title = "speed-up over PyTorch"
        if len(shown) < len(bars):
            title += f", the {len(shown)} smallest of {len(bars)}"
        height = max(_HEIGHT, 1.2 + _BAR_HEIGHT * sum(map(len, shown.values())))
        found["speedup"] = height, lambda axes: _speedup(axes, shown, title)
    else:
        left.append("no plot of speed-ups: no row has a time of PyTorch")
    if results.rows:
        found["roofline"] = _HEIGHT, lambda axes: _roofline(axes, results)
    else:
        left.append("no roofline: there are no rows")
    timed = {case: time for case in _LADDER.lines if isinstance(time := results.cases.get(case), Timing)}
    if timed:
        found["ladder"] = _HEIGHT, lambda axes: _ladder(axes, timed, results.target.name)
    else:
        reasons = {str(results.cases.get(case, "not asked for")) for case in _LADDER.lines}
        left.append(f"no ladder: its steps have no times ({', '.join(sorted(reasons))})")
    return found, left


# Speed-ups


def _form(row: Row) -> str:
    return f"{_layout(row)} {row.shape.dtype}, batch {row.shape.batch}"


def _layout(row: Row) -> str:
    operation = row.shape.operation
    return row.shape.layout if operation == "forward" else f"{operation} {row.shape.layout}"


def _bars(rows: list[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return ratios, in the same and in any layout, by network or layer, and by form.

    A network's is the geometric mean of its layers'; with one in all, or none, each layer has bars. The slowest are
    first. Many forms become two, the layouts.
    """
    few = len(set(map(_form, rows))) <= _FORMS
    grouped: dict[str, dict[str, list[Row]]] = {}
    networks = {name for row in rows for name in row.networks}
    for row in rows:
        for name in row.networks if len(networks) > 1 else [row.short]:
            grouped.setdefault(name, {}).setdefault(_form(row) if few else _layout(row), []).append(row)
    means = {
        name: {form: (_mean(found, same=True), _mean(found, same=False)) for form, found in forms.items()}
        for name, forms in grouped.items()
    }
    return {name: means[name] for name in sorted(means, key=lambda name: min(any_ for _, any_ in means[name].values()))}


def _mean(rows: list[Row], *, same: bool) -> float:
    return geometric_mean((row.ratio(row.shape.layout) if same else None) or row.ratio() or 1.0 for row in rows)


def _speedup(axes: "Axes", bars: dict[str, dict[str, tuple[float, float]]], title: str) -> None:
    forms = sorted({form for found in bars.values() for form in found})
    colours = dict(zip(forms, cycle(_COLOURS), strict=False))
    place, ticks, highest, lowest = 0.0, [], 1.0, 1.0
    for found in bars.values():
        ticks.append(place + (len(found) - 1) / 2)
        for form in sorted(found):
            same, any_ = found[form]
            axes.barh(place, same - 1, left=1, color=colours[form], height=0.9)
            axes.plot(any_, place, "|", color="black", markersize=7, markeredgewidth=1.6)
            highest, lowest = max(highest, same, any_), min(lowest, same, any_)
            place += 1
        place += 0.6
    axes.set_yticks(ticks, list(bars), fontsize=7)
    axes.set_ylim(place - 0.6, -1)
    axes.set_xscale("log")
    axes.set_xlim(lowest / 1.15, highest * 1.15)
    _write_plainly(axes.xaxis, "x")
    axes.axvline(1, color="black", linewidth=1)
    axes.grid(axis="x", linewidth=0.4)
    axes.set_axisbelow(True)
    for form in forms:
        axes.bar(0, 0, color=colours[form], label=form)
    _explain(axes, title, x="bar: over its fastest way in the same layout; line: in any layout")


def _explain(axes: "Axes", title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, fontsize=9 if "\n" in title else 10)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.legend(fontsize=7)


def _write_plainly(axis: "Axis", unit: str = "") -> None:
    """Write 1, 2 and 5 of every decade of a logarithmic axis, without powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}{unit}"))
    axis.set_minor_formatter(NullFormatter())


# Roofline


def _roofline(axes: "Axes", results: Results) -> None:
    target = results.target
    intensities: list[float] = []
    for layout, marker in {"NCHW": "o", "NHWC": "s"}.items():
        rows = [row for row in results.rows if row.shape.layout == layout]
        for what, colour, fill in (("PyTorch", _PEERS, "none"), ("dwtir", _OURS, _OURS)):
            points = []
            for row in rows:
                best = ("dwtir", row.own) if what == "dwtir" else row.best(layout)
                if best is not None:
                    points.append((row.shape.flop / row.least_bytes, row.shape.flop / best[1] / 1e9))
            if points:
                x, y = zip(*points, strict=True)
                look: dict[str, Any] = {"color": colour, "markerfacecolor": fill, "markersize": 4, "alpha": 0.8}
                axes.plot(x, y, marker, label=f"{what} {layout}", **look)
                intensities += x
    low, high = min(intensities) / 1.5, max(intensities) * 1.5
    title = "roofline\nlimits not known"
    line: dict[str, Any] = {"color": "black", "linewidth": 1}
    if target.bandwidth is not None:
        title, memory = "roofline", target.bandwidth / 1e9
        ridge = high if target.fp32_rate is None else target.fp32_rate / target.bandwidth
        ends = low, max(low, min(ridge, high))
        axes.plot(ends, [x * memory for x in ends], "-", label=f"memory, {memory:.0f} GB/s", **line)
    if target.fp32_rate is not None:
        title, rate = "roofline", target.fp32_rate / 1e9
        axes.plot((low, high), [rate] * 2, "--", label=f"float32, {rate:.0f} GFLOP/s", **line)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        _write_plainly(axis)
    axes.tick_params(which="both", labelsize=7)
    axes.grid(linewidth=0.4)
    if not all(row.cold for row in results.rows):
        title += "\nwarm: data in the caches may pass the limit of memory"
    _explain(axes, title, x="FLOP per byte that must cross memory", y="GFLOP/s")


# Ladder


def _ladder(axes: "Axes", timed: dict[Case, Timing], device: str) -> None:
    cases, article = list(_LADDER.lines), _LADDER.article
    first = cases[0]
    published = {case: PUBLISHED_US[first] / PUBLISHED_US[case] for case in cases}
    ours = {case: timed[first].median / time.median for case, time in timed.items()} if first in timed else {}
    there, here = f"article, {article.device}", f"here, {device}"
    for offset, gains, label, colour in ((-0.2, published, there, _PEERS), (0.2, ours, here, _OURS)):
        places = [cases.index(case) + offset for case in gains]
        bars = axes.bar(places, list(gains.values()), 0.38, color=colour, label=label)
        axes.bar_label(bars, fmt="%.3gx", fontsize=7)
    axes.set_yscale("log")
    _write_plainly(axes.yaxis, "x")
    ways = [article.library if case.way == "library" else case.way for case in cases]
    axes.set_xticks(range(len(cases)), ways, fontsize=8)
    axes.tick_params(axis="y", which="both", labelsize=7)
    _explain(axes, f"{first.shape}, naive to tuned", y="times as fast as naive")
