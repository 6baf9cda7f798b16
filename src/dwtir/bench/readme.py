"""What is generated from committed results: README's block, and the picture of a GPU."""

import hashlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import geometric_mean

from ..errors import RecordError
from .plots import panels, plot
from .report import piped
from .results import Results
from .row import Row

BEGIN = "<!-- begin: python -m dwtir.bench readme -->"
END = "<!-- end: python -m dwtir.bench readme -->"

_FOLDER = Path("bench", "results")
_SUFFIX = ".json.xz"
_PANEL = "speedup"
_LOST = ("below 1", "worst")
_HEAD = ("device", "layers", "rows", "same layout", *_LOST, "any layout", *_LOST)


def sources(readme: Path) -> list[Path]:
    """Find the committed results beside a README."""
    found = sorted((readme.parent / _FOLDER).glob(f"bench-*{_SUFFIX}"))
    if not found:
        raise RecordError(f"no results: {readme.parent / _FOLDER} has no bench-*{_SUFFIX}")
    return found


def _results(readme: Path) -> dict[Path, Results]:
    return {source: Results.read(source) for source in sources(readme)}


def _stem(source: Path) -> str:
    return source.name.removesuffix(_SUFFIX)


def current(readme: Path) -> str:
    """Return what README should contain."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    if not begin or not end:
        raise RecordError(f"{readme} lacks the lines {BEGIN} and {END}")
    block = "\n".join(_block(_results(readme)))
    return f"{before}{begin}\n{block}\n\n{end}{after}"


def pictures(readme: Path) -> dict[Path, Path]:
    """Return the pictures of the results, each with the file that it is made from."""
    source = _pictured(_results(readme))
    return {source.with_name(f"{_stem(source)}-{_PANEL}.png"): source} if source else {}


def digest(source: Path) -> str:
    """Return what a picture notes of the file that it is made from."""
    return f"sha256 {hashlib.sha256(source.read_bytes()).hexdigest()}"


def rewrite(readme: Path) -> list[str]:
    """Write README's block, and the picture; return what was."""
    readme.write_text(current(readme), encoding="utf-8")
    lines = [f"wrote {readme}"]
    for source in pictures(readme).values():
        stem, made_from = f"{_stem(source)}-", digest(source)
        lines += plot(Results.read(source), source.parent, prefix=stem, source=made_from, only=[_PANEL])
    return lines


def _pictured(found: dict[Path, Results]) -> Path | None:
    drawn = (source for source, of in found.items() if of.target.is_gpu and _PANEL in panels(of))
    return max(drawn, key=lambda source: len(found[source].rows), default=None)


def _block(found: dict[Path, Results]) -> list[str]:
    cells: list[tuple[str, ...]] = [_HEAD]
    for results in found.values():
        for layers, rows in groupby(sorted(results.rows, key=_form), key=_form):
            compared = [row for row in rows if row.ratio() is not None]
            figures = [cell for same in (True, False) for cell in _figures(compared, same)]
            cells.append((results.target.name, layers, str(len(compared)), *figures))
    lines = [
        "PyTorch's time over dwtir's, by geometric mean, against its fastest way in the same",
        "layout and in any; above 1, dwtir is faster.",
        "",
        *piped(cells),
    ]
    pictured = _pictured(found)
    for source, results in found.items():
        path = f"{_FOLDER.as_posix()}/{_stem(source)}"
        about = [results.about[key] for key in ("CPU", "GPU", "cores") if key in results.about]
        about.append(f"torch {results.about.get('torch', 'none')}")
        doubtful = sum(row.doubtful for row in results.rows)
        about.append(f"{doubtful} of {len(results.rows)} rows with times that are flagged")
        name = _stem(source).removeprefix("bench-")
        all_rows = f"`python -m dwtir.bench report {path}{_SUFFIX}` prints all rows of {name}"
        lines += ["", f"{all_rows}: {', '.join(about)}."]
        if source == pictured:
            lines += ["", f"![{_PANEL} on {name}]({path}-{_PANEL}.png)"]
    return lines


def _form(row: Row) -> str:
    what = "" if row.shape.operation == "forward" else f"{row.shape.operation}, "
    return f"{what}{row.shape.layout}, {'cold' if row.cold else 'warm'}"


def _figures(rows: Sequence[Row], same: bool) -> tuple[str, str, str]:
    found = [(ratio, row) for row in rows if (ratio := row.ratio(row.shape.layout if same else None)) is not None]
    if not found:
        return "-", "-", "-"
    worst, row = min(found, key=lambda pair: pair[0])
    mean = geometric_mean(ratio for ratio, _ in found)
    return f"{mean:.2f}x", str(sum(r < 1 for r, _ in found)), f"{worst:.2f}x: {row.short} {row.shape.dtype}"
