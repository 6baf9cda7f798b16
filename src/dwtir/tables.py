"""Tables in a terminal, and their numbers."""

from collections.abc import Sequence


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Align cells for a terminal: text to the left, numbers to the right."""
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numbers = [is_numbers(column[1:]) for column in columns]
    return [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in cells
    ]


def number(value: float | None, unit: str = "", *, digits: int = 2, scale: float = 1) -> str:
    """Write a number that may not be known."""
    return "-" if value is None else f"{value * scale:.{digits}f}{unit}"


def is_numbers(column: Sequence[str]) -> bool:
    """Tell whether cells are numbers, perhaps with a mark or unknown."""
    return all(not cell or cell == "-" or cell.rstrip("x~!").replace(".", "").isdecimal() for cell in column)
