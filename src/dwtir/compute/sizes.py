"""Sizes that the factories share."""

from ..bands import window_of
from ..shape import Shape

SLACK = 63
"""Rows and columns that a tile may hang over the edge without costing predicates."""


def padded_sizes(shape: Shape, slack: int = SLACK) -> tuple[int, int, int, int]:
    """Count rows and columns of the outputs with slack, and of the padded input they read."""
    rows, columns = shape.out_height + slack, shape.out_width + slack
    return rows, columns, window_of(shape, 0, rows), window_of(shape, 1, columns)


def aligned(shape: Shape, left: int, columns: int) -> tuple[int, int, int]:
    """Widen a padded input of NCHW for loads of vectors, `DepthwiseConv2dShape.row_lanes` long.

    Before the data `left` columns are read, and `columns` in all. Returns the columns added on the
    left, and what the two are then: multiples of a vector.
    """
    lanes = shape.row_lanes if shape.layout == "NCHW" else 1
    added = -left % lanes
    return added, left + added, -(-(columns + added) // lanes) * lanes
