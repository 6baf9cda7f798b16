"""Sizes that the factories share."""

from ..shape import Shape

SLACK = 63
"""Rows and columns that a tile may hang over the edge without costing predicates."""


def image(shape: Shape) -> tuple[int, int, int, int, int]:
    """Return N, C, M, H and W."""
    return (shape.batch, shape.in_channels, shape.channel_multiplier, shape.height, shape.width)


def padded_sizes(shape: Shape, slack: int = SLACK) -> tuple[int, int, int, int]:
    """Count rows and columns of the outputs with slack, and of the padded input they read."""
    rows, columns = shape.out_height + slack, shape.out_width + slack
    return (
        rows,
        columns,
        (rows - 1) * shape.stride[0] + (shape.kernel[0] - 1) * shape.dilation[0] + 1,
        (columns - 1) * shape.stride[1] + (shape.kernel[1] - 1) * shape.dilation[1] + 1,
    )


def aligned(shape: Shape, left: int, columns: int) -> tuple[int, int, int]:
    """Widen a padded input of NCHW for loads of vectors, `DepthwiseConv2dShape.row_lanes` long.

    Before the data `left` columns are read, and `columns` in all. Returns the columns added on the
    left, and what the two are then: multiples of a vector.
    """
    lanes = shape.row_lanes if shape.layout == "NCHW" else 1
    added = -left % lanes
    return added, left + added, -(-(columns + added) // lanes) * lanes
