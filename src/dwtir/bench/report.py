"""What a benchmark found, as text: tables, ratios, means, and the worst row by name."""

from collections.abc import Sequence
from statistics import geometric_mean

from ..tables import aligned, is_numbers, number
from .articles import TABLES, table_cells
from .results import Results
from .row import WIDE, Row

_HEAD = ("layer", "dwtir us", "% floor", "same layout us", "same", "any us", "any", "by")
_ON_PAGE = (0, 1, 2, 4, 6, 7)
"""Of these, what a page has room for: PyTorch's times are in the results that it is made from."""

_MAX_REASONS = 10


def text(results: Results) -> list[str]:
    """Write results for a terminal: about, rows, summary and the articles' tables."""
    lines = [", ".join(f"{name} {value}" for name, value in results.about.items())]
    if results.rows:
        lines += ["", *aligned(row_cells(results.rows)), "", *summary(results.rows)]
    for title, cells in _article_tables(results):
        lines += ["", title, *aligned(cells)]
    return lines


def markdown(results: Results) -> list[str]:
    """Write results as a page."""
    lines = [f"# Benchmark on {results.target.name}", ""]
    lines += piped([("", ""), *results.about.items()])
    if results.rows:
        lines += ["", "## Layers", "", *_explained(results.rows), ""]
        cells = [tuple(line[i].removeprefix("torch ") for i in _ON_PAGE) for line in row_cells(results.rows)]
        lines += [*(f"- {line}" for line in summary(results.rows)), "", *piped(cells)]
    for title, cells in _article_tables(results):
        lines += ["", f"## {title}", "", *piped(cells)]
    return lines


def _explained(rows: Sequence[Row]) -> list[str]:
    kinds = {
        True: "cold, inputs that rotate through three times the last cache",
        False: "warm, data that stays in the caches",
    }
    data = " and ".join(what for cold, what in kinds.items() if cold in {row.cold for row in rows})
    return [
        f"Medians of rounds in turns, {data}. Ratios are PyTorch's time over dwtir's, of its",
        "fastest way in the same layout and in any, and by which layout and library that is: above 1,",
        f"dwtir is faster. ~ marks a spread (p20 to p80) above {100 * WIDE:.0f} %, ! a row whose",
        "CPU others used meanwhile.",
    ]


def _article_tables(results: Results) -> list[tuple[str, list[tuple[str, ...]]]]:
    if not results.cases:
        return []
    return [(f"{table.article.name}: {table.title}", table_cells(table, results.cases)) for table in TABLES]


def row_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Write rows as cells, the first line their head."""
    return [_HEAD, *map(_cells, rows)]


def _cells(row: Row) -> tuple[str, ...]:
    best = row.best()
    return (
        row.brief,
        _time(row, ("dwtir", row.own)),
        "-" if row.floor is None else f"{100 * row.floor / row.own:.0f}",
        _time(row, row.best(row.shape.layout)),
        number(row.ratio(row.shape.layout), "x"),
        _time(row, best),
        number(row.ratio(), "x"),
        best[0] if best else "-",
    )


def _time(row: Row, found: tuple[str, float] | None) -> str:
    if found is None:
        return "-"
    name, seconds = found
    return f"{seconds * 1e6:.2f}{'!' if row.disturbed else '~' if name in row.wide else ''}"


def piped(cells: Sequence[Sequence[str]]) -> list[str]:
    """Write cells as a table of Markdown."""
    head, *lines = cells
    rules = ["---:" if is_numbers(column) else "---" for column in zip(*lines, strict=True)]
    return [f"|{'|'.join(line)}|" for line in (head, rules, *lines)]


def summary(rows: Sequence[Row]) -> list[str]:
    """Write geometric means, and the worst row by name."""
    lines = []
    for what, same in (("in the same layout", True), ("in any layout", False)):
        ratios = [(ratio, row) for row in rows if (ratio := row.ratio(row.shape.layout if same else None)) is not None]
        if ratios:
            worst, row = min(ratios, key=lambda pair: pair[0])
            mean = geometric_mean(ratio for ratio, _ in ratios)
            lines.append(
                f"against the best PyTorch {what}: {mean:.2f}x by geometric mean over "
                f"{len(ratios)} rows, {sum(ratio < 1 for ratio, _ in ratios)} below 1; "
                f"worst {worst:.2f}x: {row.brief}"
            )
    floors = [row.floor / row.own for row in rows if row.floor is not None]
    if floors:
        lines.append(f"share of the floor: {100 * geometric_mean(floors):.0f} % by geometric mean")
    wide = sum(bool(row.wide) for row in rows)
    if wide:
        lines.append(f"{wide} rows have a spread above {100 * WIDE:.0f} %; such times are marked ~")
    disturbed = sum(row.disturbed for row in rows)
    if disturbed:
        lines.append(f"{disturbed} rows were measured while others used the CPU; they are marked !")
    reasons = sorted({reason for row in rows for reason in row.wrong})
    lines += [f"left out: {reason}" for reason in reasons[:_MAX_REASONS]]
    if len(reasons) > _MAX_REASONS:
        lines.append(f"left out: {len(reasons) - _MAX_REASONS} more; --json has all")
    return lines
