"""An estimate of the time that `split_image` takes.

A block loads, multiplies and stores one after the other, and other blocks of its SM use what it leaves: the time lies
between the longest of arithmetic and memory, where many blocks are there at a time, and their sum.
"""

from math import ceil, log2, prod

import numpy as np

from ..pieces import WARP, Pieces
from .tiles import CLOCK, longer

# Bytes a second and a launch; cycles of a scheduler's instruction, and of a pass through the banks of shared memory;
# instructions of a copy, and passes of each pixel that a warp copies in NHWC; the exponent by which the longer of
# arithmetic and memory counts more, and what twice the blocks add to it; warps of an SM by which those there are too
# few. Fitted to 1067 kernels of 148 layers on an H200: half are within 7 %, and the choice is 3 % behind the best.
_BANDWIDTH, _LAUNCH = 4.25e12, 2.0e-6
_ISSUE, _PASS = 1.195 / 4, 0.923
_COPY, _PIXEL = 12.5, 1.55
_LONGER, _TWICE, _FEW = 1.28, 0.74, 2.04
# Instructions of a pixel's copy in NHWC, and of a row in a loop (371 kernels of 149 layers: half within 6 %).
_SINGLE, _LOOP = 2.5, 8.0
# Instructions of a narrow copy, and the exponent by which arithmetic and banks then both count (123 kernels of 24
# layers, choice 1.1 % behind the best).
_NARROW, _BOTH = 5.0, 6.0
# What a byte that several blocks read costs, in bytes of memory.
_AGAIN = 0.35
# What pieces take of that, more the narrower their strips, and with a stride: of 160 kernels of 25 layers. Of halves
# (346 kernels of 64 layers, choice 1.2 % behind the best), and more the fewer they are.
_PIECE, _STRIP, _STRIDED = 0.97, 0.3, 1.15
_HALVES, _FEW_PIECES = 0.985, 0.1
_BEGINS: tuple[int, ...] = (0, 3, 5)
"""Elements into a vector at which pieces may begin."""
# Instructions of a thread to find pairs in an image and in a piece, what more the latter take (125 kernels of 24
# layers, choice 1.5 % behind the best); whole images copy as fast as they issue.
_FOUND, _PAIRS = (40, 250), (0.92, 1.13)  # the last with a stride
# How far blocks of one round, which load at the same time, use what others leave, and by how much more in another.
_ALIKE, _ANOTHER = 0.3, 0.8


def expected_seconds(pieces: Pieces, at_a_time: int, units: int) -> float:
    """Estimate the time of a kernel whose blocks have such pieces, if an SM has room for so many at a time.

    Fewer than four warps leave some of an SM's schedulers nothing to do.
    """
    shape, images = pieces.shape, pieces.images
    blocks = pieces.blocks
    of_each = ceil(blocks / units)
    together, warps = min(of_each, at_a_time), -(-images.images * images.channels * pieces.each // WARP)
    issued, passes = _work(pieces)
    issue, through = max(4, of_each * warps) * issued * _ISSUE / CLOCK, of_each * warps * passes * _PASS / CLOCK
    busy = longer(issue, through, _BOTH) if pieces.is_narrow else max(issue, through)
    again = shape.batch * shape.result_channels * (pieces.pieces * pieces.read - prod(images.source)) * shape.itemsize
    memory = (shape.least_bytes + _AGAIN * again) / _BANDWIDTH / min(1.0, 2 * blocks / units)
    rounds = blocks / units / together
    power = 1.0  # a block alone does one after the other
    if together > 1:
        power = _LONGER + _TWICE * log2(together) * min(1.0, _ALIKE + _ANOTHER * max(0.0, rounds - 1))
    more = 1 + _FEW / max(4, together * warps)
    if pieces.pieces > 1:
        more *= _PIECE * (1 + _STRIP / pieces.cols)
        more *= _HALVES * (1 + _FEW_PIECES / pieces.pieces) if shape.itemsize == 2 else 1
        more *= _STRIDED if shape.operation == "forward" and max(shape.stride) > 1 else 1
    if pieces.takes_pairs and not pieces.is_plain:
        more *= _PAIRS[shape.stride != (1, 1)]
    return _LAUNCH + more * longer(busy, memory, power)


def _work(pieces: Pieces) -> tuple[float, float]:
    """Count the instructions of a warp, and its passes through the banks of shared memory."""
    images, shape, width, columns = pieces.images, pieces.shape, pieces.cols, pieces.window
    kernel_w, rows, is_half, each = shape.kernel[1], pieces.rows, shape.itemsize == 2, pieces.each
    (read, written), is_planar = (pieces.read, pieces.written), shape.layout == "NCHW"
    middle = pieces.pieces // 2 * pieces.bands  # whose rows are the most, and have no padding
    firsts = [images.first(middle + band, pieces.all_bands) for band in range(pieces.bands)]
    tops = [images.top(first) for first in firsts]
    seen, met = _met(pieces, tops)
    beside = sum(len(pieces.columns(kw)[0]) for kw in range(kernel_w))
    lanes_in, lanes_out = pieces.lanes_in, pieces.lanes_out
    loads, stores = seen * columns / lanes_in, rows * width / (lanes_out if is_planar else 1)
    if pieces.takes_pairs:
        loads, lanes_in = seen * (columns // 2 + 1), 2
    if pieces.puts_pairs:
        stores, lanes_out = rows * ((width - 1) // 2 + 2 - width % 2), 2
    copies = sum(pieces.vectors_of(pixels) / each for pixels in (read, written)[: 1 + is_planar])
    converted = is_half * (seen * columns + (0.5 if pieces.puts_pairs else 2) * rows * width)
    selected = pieces.takes_pairs * seen * columns + pieces.puts_pairs * rows * width
    if shape.stride == (1, 1):  # else counts of single ones fit
        selected = selected / 2 + (_FOUND[pieces.pieces > 1] if pieces.takes_pairs else 0)
    weights = prod(shape.kernel) if pieces.is_unrolled else met * kernel_w
    issued = met * beside + weights + loads + stores + rows * width + converted + selected
    by_pairs = pieces.takes_pairs and pieces.is_plain
    copied = (_NARROW if pieces.is_narrow else _COPY) if is_planar else _SINGLE
    issued += copies if by_pairs else copied * copies
    issued += 0 if pieces.is_unrolled or images.phases > 1 else _LOOP * seen

    def crowd(starts: list[int], elements: int, sizes: tuple[int, int], lanes: int) -> float:
        """Count the passes of a load by the first warp, of vectors that begin there in each plane.

        Of pieces of halves, by any warp, on average.
        """
        planes, size, in_pieces = images.channels * images.images, lanes * shape.itemsize, pieces.pieces > 1
        count, begins = planes * len(starts), _BEGINS
        if not (in_pieces and is_half):
            count, begins = min(WARP, count), (0,)
        number, plane = np.arange(count), np.arange(count) % planes
        apart = plane * pieces.stride(elements) + np.array(starts)[number // planes]
        passes = 0
        for begin in begins:
            vectors = (apart + (begin + plane * prod(sizes)) % shape.lanes * in_pieces) // lanes * size
            words = vectors[:, None] // 4 + np.arange(max(1, size // 4))
            together = number[:, None] // min(WARP, 4 * WARP // size)
            banks = np.unique(together << 20 | words % (1 << 20))
            crowds = np.bincount((banks >> 20) * WARP + banks % WARP, minlength=(together[-1, 0] + 1) * WARP)
            passes += crowds.reshape(-1, WARP).max(1).sum()
        return float(passes) / (-(-count // WARP) * len(begins))

    inputs = [top * images.source[1] + part * pieces.step for top in tops for part in range(pieces.parts)]
    outputs = [first * images.result[1] + part * width for first in firsts for part in range(pieces.parts)]
    passes = loads * crowd(inputs, read, images.source, lanes_in)
    passes += weights + prod(shape.kernel) / (images.images * each)
    if is_planar:
        passes += stores * crowd(outputs, written, images.result, lanes_out)
        return issued, passes + (read + written) * shape.itemsize / 4 / each
    return issued, passes + stores + _PIXEL * (copies + stores) * WARP / images.channels


def _met(pieces: Pieces, tops: list[int]) -> tuple[float, float]:
    """Count the rows of the image that a warp goes through, if any of its bands sees them, and those of the kernel."""
    images, rows = pieces.images, pieces.rows
    shape, (height, _) = images.shape, images.source
    taps = range(0, shape.kernel[0] * shape.dilation[0], shape.dilation[0])
    meets = [sum(images.above(seen, row) in taps for row in range(rows)) for seen in range(images.seen(rows))]
    of_band = images.channels * images.images * pieces.parts
    warps = -(-of_band * len(tops) // WARP)
    seen = met = 0
    for warp in range(warps):
        own = tops[warp * WARP // of_band : -(-(warp + 1) * WARP // of_band)]
        passed = [row for row in range(len(meets)) if any(0 <= top + row < height for top in own)]
        seen, met = seen + len(passed), met + sum(meets[row] for row in passed)
    return (met if images.are_apart(rows) else seen) / warps, met / warps
