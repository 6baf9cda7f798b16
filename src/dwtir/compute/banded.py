"""The convolution of halves as products with banded matrices; see `dwtir.bands`.

Blocks beside those of `compute`: ``gather`` and ``planes``, the images and in NHWC the weights, as `dwtir.planes` has
them, if they are copied; ``sheet`` and ``beside``, staged planes of inputs and of what results are added to; ``pad``,
the inputs of 16 tiles as lanes hold them, and ``band``, the banded matrices likewise; ``sums``, in NHWC, the sums in
the order of the tiles, for threads that go along channels; ``residual``, what the epilogue adds, for those who hold the
sums; ``spread``, results from planes in shared memory, where ``store`` brought them.

What a lane holds follows ``mma.sync.m16n8k16`` in the PTX ISA. Lane ``4 * m + x`` has inputs
``2 * x``, ``2 * x + 1`` and eight further, or, as their order is free, four from ``4 * x``, of tiles
``m`` and ``m + 8``; the sums of columns ``2 * x`` and ``2 * x + 1`` of the same tiles; and, as lane
``4 * x + k``, of the band's column ``x`` the rows of its inputs.
"""

from tvm import tirx
from tvm.script import tirx as T

from ..bands import COLUMNS, DEPTH, TILES, Bands
from ..epilogue import Epilogue
from ..planes import Planes
from . import script
from .blocks import product
from .forward import both_ends
from .mma import left, left_beside, right
from .parts import all_hold, by_places, fill, made, swapped, when
from .sizes import SLACK
from .unaligned import pair_of_row


def products(bands: Bands, epilogue: Epilogue) -> tirx.PrimFunc:
    """Define the convolution, or the data's gradient."""
    shape = bands.shape
    (H, W), (N, M) = shape.source, (shape.batch, shape.channel_multiplier)
    SC, RC = bands.source_channels, shape.result_channels
    OH, OW = shape.result_height, shape.result_width
    (KH, KW), (SH, SW), (DH, DW) = shape.kernel, shape.stride, bands.dilation
    DOWN, ACROSS = bands.parts
    R, ROWS, STEPS = bands.rows, bands.kernel_steps * bands.kernel_rows, bands.depth_steps
    PH, BH, BY_IMAGE = bands.window_rows(ROWS), bands.band_rows(ROWS), bands.goes_by_image
    TOP, LEFT, SHIFT = 0 if BY_IMAGE else bands.top, bands.left, bands.shift
    UNSEEN = bands.top - (R - 1) * SH if BY_IMAGE else 0  # rows of the kernel that see no image
    GROUPS = bands.groups
    HELD_PAIRS = {"c": RC, "g": GROUPS, "r": R, "lane": 32, "m": 2}  # of sums
    HELD = HELD_PAIRS | {"e": 2}
    TURNED, PAIRS, ALTERNATES = bands.is_turned, bands.has_pairs, bands.alternates
    PAIRED = bands.alternates_results
    KINDS = 1 + ALTERNATES  # of rows, each with a band of its own
    LOADED = {"c": SC, "g": GROUPS + SLACK, "ih": PH, "s": STEPS, "lane": 32, "k": 2, "m": 2, "e": 2 // KINDS}
    HOLDS, found = ((3, 2), left_beside) if bands.is_staged else ((2, 2, 2), left)
    RUN, APART = bands.run, 8 if bands.run == 2 else 2  # from lane to lane, and from a lane's pair to its next
    NHWC, COPIED, STAGED = shape.layout == "NHWC", bands.is_copied, bands.is_staged
    if STAGED:
        SHEET, LEAVING, IMAGES, SIDES = bands.sheet, bands.leaving, bands.images, bands.sides
    copies = Planes(bands)
    POSITIONS, WEIGHTS = copies.positions, copies.images
    dtype = shape.dtype
    declare, finish = both_ends(shape, epilogue)
    has_residual = "residual" in epilogue.operands(shape)

    def tile(group, half, lane):
        if STAGED:  # tiles side by side are halves of a product
            eighth, side, across = lane // 4, group % SIDES, bands.across // 2
            n, y = group // SIDES * IMAGES + eighth // bands.stacked, side // across + eighth % bands.stacked
            return n, y, side % across * 2 + half
        if ACROSS == 2:  # its halves are the parts
            return bands.place(group * (TILES // 2) + lane // 4)
        return bands.place(group * TILES + half * 8 + lane // 4)

    def turn(*place):
        """Exchange half and place in a pair where two that lie side by side are of other halves."""
        *others, half, one = place
        return (*others, one, half) if ACROSS == 2 else place

    def line(y, row, step: int = 1):
        return (y // DOWN * (R * step) + row) * DOWN + y % DOWN

    def side(column, half, one):
        return (column + one) * 2 + half if ACROSS == 2 else column + one

    def early(channel, row):
        """Tell how many columns before the image a row of a tile begins, for its pairs to be aligned."""
        return (channel * (OH % 2) + row) % 2 if PAIRED else 0

    def is_inside(channel, group, row, lane, *pair):
        half, one = turn(pair[0], 0 if OW % 2 == 0 else pair[1])
        n, y, x = tile(group, half, lane)
        column = side(x * COLUMNS + lane % 4 * 2, half, one) - early(channel, row)
        return tirx.all(n < N, line(y, row) < OH, *[0 <= column] * PAIRED, column < OW)

    def place(n, channel, row, column):
        return (n, row, column, channel) if NHWC else (n, channel, row, column)

    def element(group, channel, row, lane, *pair):
        half, one = turn(*pair)
        n, y, x = tile(group, half, lane)
        return place(n, channel, line(y, row), side(x * COLUMNS + lane % 4 * 2, half, one) - early(channel, row))

    def own(channel, *others):
        return (*others, channel) if NHWC else (channel, *others)  # what is stored as a vector

    def copied(image, weight, position, channel):
        n, row, column = copies.place(position)
        value = T.if_then_else(
            tirx.all(position < WEIGHTS, column < W), image[place(n, channel, row, column)], T.cast(0, dtype)
        )
        if not NHWC:
            return value
        tap = position - WEIGHTS
        # Without a multiplier TVM has to see that neighbouring channels are a vector.
        row, result = (tap // KW, 0) if M == 1 else (tap // KW % KH, tap // (KH * KW))
        return T.if_then_else(tirx.all(0 <= tap, tap < copies.weights), weight[row, tap % KW, channel, result], value)

    def later(channel, row):
        """Tell how many columns further the pairs of a row of a window begin than they could."""
        return (channel * (H % 2) + row + TOP + LEFT) % 2

    def first_of(x, step, lane, further=0):
        """Find the column, of padding too, that a lane's inputs of a product begin with, or those further."""
        return x * (COLUMNS * SW) + step * DEPTH + lane % 4 * RUN + further * APART

    def pad(image, channel, group, row, step, *place):
        lane, further, half, one = turn(*place)
        n, y, x = tile(group, half, lane)
        row = line(y, row, SH)
        first = first_of(x, step, lane)
        pair = first + further * APART
        tested = side(pair if RUN == 2 else first, 0, one if ACROSS == 2 or not PAIRS else 0)
        column = side(pair, half, one) - LEFT
        return T.if_then_else(
            tirx.all(
                *(n < N, TOP <= row, row < TOP + H),
                *(T.Not(tested < LEFT), tested < LEFT + W + W * PAIRS % 2),  # as in forward
            ),
            image[channel, (n * H + row - TOP) * copies.pitch + column]
            if COPIED
            else image[n, channel, row - TOP, column],
            T.cast(0, dtype),
        )

    def alternating(image, channel, group, row, *place):
        step, lane, further, half, _ = place
        n, y, x = tile(group, half, lane)
        first = first_of(x, step, lane, further)
        columns = first, first - LEFT + later(channel, row)
        return pair_of_row(image, (n, channel), (y * (R * SH), row), columns, (TOP, LEFT - 1))

    def hold(window, image, *place):
        *others, one = place
        value, at = (alternating, T.Ramp(one * 2, 1, 2)) if ALTERNATES else (pad, one)
        T.buffer_store(window, value(image, *place), turn(*others, at))

    def staged(sheet, channel, group, row, step, lane, eight, one):
        """Load an input of a tile, of the one beside it, or of what lies behind both.

        It is in shared memory, with rows of zeros around the image, but no columns.
        """
        n, y, x = tile(group, 0, lane)
        first = first_of(x, step, lane, eight)
        at = SHEET.place(y, row - TOP) + first + one - LEFT
        value = sheet[channel, group // SIDES, n % IMAGES, at // SHEET.vector, at % SHEET.vector]
        return T.if_then_else(all_hold(LEFT <= first, first < LEFT + W), value, T.cast(0, dtype))

    def tap(weight, channel, row, step, *place):
        lane, further, one = place
        row, kind = row // KINDS, row % KINDS
        apart = step * DEPTH + further * APART + lane % 4 * RUN + one - SHIFT - lane // 4 * SW
        if ALTERNATES:  # rows of results are of a kind if they come in pairs, else those of the window
            seen = kind * SH + row * DH if PAIRED else kind
            apart = apart + later(channel // M, seen) + early(channel, kind) * SW
        row, column = UNSEEN + row, apart // DW
        at = (KH - 1 - row, KW - 1 - column) if TURNED else (row, column)
        return T.if_then_else(
            tirx.all(row < KH, 0 <= apart, apart < KW * DW, apart % DW == 0),
            weight[channel // M, WEIGHTS + (channel % M * KH + at[0]) * KW + at[1]]
            if NHWC
            else weight[channel // M, channel % M, at[0], at[1]],
            T.cast(0, dtype),
        )

    def band_row(row, kernel_row):
        if BY_IMAGE:
            return (kernel_row + (R - 1 - row) * SH) * KINDS + kernel_row % KINDS
        return kernel_row * KINDS + (row if PAIRED else row * SH + kernel_row * DH) % KINDS

    # What each lane does for each of its sums.

    @script.inline
    def order(acc, sums, c, g, r, lane, m, e):
        sums[c, g, r, m, lane, e] = acc[c, g, r, lane, m, e]

    @script.inline
    def take(residual, held, c, g, r, lane, m, e):
        if is_inside(c, g, r, lane, m, e):
            held[own(c, g, r, lane, m, e)] = residual[element(g, c, r, lane, m, e)]

    @script.inline
    def end(sums, operands, rounded, c, g, r, lane, m, e):
        value = T.meta_var(sums[c, g, r, m, lane, e] if NHWC else sums[turn(c, g, r, lane, m, e)])
        rounded[own(c, g, r, lane, m, e)] = finish(value, operands, c, own(c, g, r, lane, m, e))

    @script.inline
    def store(rounded, out, c, g, r, lane, m, e):
        if is_inside(c, g, r, lane, m, e):
            out[element(g, c, r, lane, m, e)] = rounded[own(c, g, r, lane, m, e)]

    def store_pair(rounded, out, c, g, r, lane, m):
        """Store two results, of which one may lie beside the image, aligned as what `alternating` loads."""
        n, y, x = tile(g, m, lane)
        row, first = y * R + r, x * COLUMNS + lane % 4 * 2
        column = first - early(c, r)
        begin = (((n * RC + c) * OH + y * R + r % 2) * OW) // 2 * 2 + first + r // 2 * (2 * OW)
        T.reads(rounded[c, g, r, lane, m, 0:2])
        T.writes(out[n, c, row, 0:OW])
        is_there, is_first = tirx.all(n < N, row < OH), column == -1
        with when(is_there, 0 <= column, column < OW - 1):
            T.buffer_store(out, rounded[c, g, r, lane, m, T.Ramp(0, 1, 2)], [0, 0, 0, T.Ramp(begin, 1, 2)])
        with when(is_there, tirx.any(is_first, column == OW - 1)):
            single = T.Select(is_first, rounded[c, g, r, lane, m, 1], rounded[c, g, r, lane, m, 0])
            T.buffer_store(out, single, [n, c, row, T.Select(is_first, 0, OW - 1)])

    def stage(image, sheet, height, width, channel, planes, number, vector, lane):
        n, (first, tests) = planes * IMAGES + number, sheet.source(vector * sheet.vector)
        at, is_there = first + lane, tirx.all(n < N, *tests, first < height * width)
        return T.if_then_else(is_there, image[n, channel, at // width, at % width], T.cast(0, dtype))

    def shared_place(c, g, r, lane, m, e):
        """Tell whether a lane's result is one, and find it among planes of results in shared memory."""
        n, y, x = tile(g, m, lane)
        row, column = y * R + r, x * COLUMNS + lane % 4 * 2
        at = LEAVING.place(y, r) + column + e
        place = [c, g // SIDES, n % IMAGES, at // LEAVING.vector, at % LEAVING.vector]
        return tirx.all(row < OH, column < OW), place

    def whole(buffer, c, g):
        """Find the planes that a lane has a share of: TVM wants to know no place."""
        return buffer[c, g // SIDES, 0:IMAGES, 0 : LEAVING.vectors, 0 : LEAVING.vector]

    def take_up(beside, held, c, g, r, lane, m, e):
        T.reads(whole(beside, c, g))
        T.writes(held[c, g, r, lane, m, e])
        is_there, place = shared_place(c, g, r, lane, m, e)
        with when(is_there):
            T.buffer_store(held, beside[tuple(place)], [c, g, r, lane, m, e])

    def leave(rounded, leaving, c, g, r, lane, m, e):
        T.reads(rounded[c, g, r, lane, m, e])
        T.writes(whole(leaving, c, g))
        is_there, place = shared_place(c, g, r, lane, m, e)
        with when(is_there):
            T.buffer_store(leaving, rounded[c, g, r, lane, m, e], place)

    def spread(leaving, out, c, planes, number, vector, lane):
        n, (first, tests) = planes * IMAGES + number, LEAVING.source(vector * LEAVING.vector)
        at = first + lane
        T.reads(leaving[c, planes, number, vector, lane])
        T.writes(out[n, c, at // OW, at % OW])
        with when(n < N, *tests, first < OH * OW):
            T.buffer_store(out, leaving[c, planes, number, vector, lane], [n, c, at // OW, at % OW])

    @script.prim_func(s_tir=True)
    def banded() -> None:
        image, weight, operands, out = T.meta_var(declare())
        window = made(dtype, SC, GROUPS + SLACK, PH, STEPS, 32, *HOLDS)
        band = made(dtype, RC, BH * KINDS, STEPS, 32, 2, 2)
        acc = made("float32", RC, GROUPS + SLACK, R, 32, 2, 2)
        rounded = made(dtype, *own(RC, GROUPS, R, 32, 2, 2))
        if COPIED:
            gathered = made(dtype, POSITIONS, SC)
            planes = made(dtype, SC, POSITIONS)
            fill("gather", "f c", gathered, copied, image, weight)
            fill("planes", "c f", planes, swapped, gathered)
        if STAGED:
            sheet = made(dtype, SC, GROUPS // SIDES, IMAGES, SHEET.vectors, SHEET.vector)
            leaving = made(dtype, RC, GROUPS // SIDES, IMAGES, LEAVING.vectors, LEAVING.vector)
            fill("sheet", "c p i f v", sheet, stage, image, SHEET, H, W)
            fill("pad", "c g ih s lane k e", window, staged, sheet)
        else:
            by_places("pad", LOADED, hold, window, planes if COPIED else image)
        fill("band", "c kh s lane k e", band, tap, planes if NHWC else weight)
        for c, g, r, kh, s, lane, h, e, k in T.grid(RC, GROUPS + SLACK, R, ROWS, STEPS, 32, 2, 2, DEPTH):
            with T.sblock("depthwise_conv2d"):
                vc, vg, vr, vkh, vs, vl, vh, ve, vk = T.axis.remap("SSSRRSSSR", [c, g, r, kh, s, lane, h, e, k])
                with T.init():
                    acc[vc, vg, vr, vl, vh, ve] = T.float32(0)
                acc[vc, vg, vr, vl, vh, ve] += product(
                    window[found(vc // M, vg, vkh if BY_IMAGE else vr * SH + vkh * DH, vs, vl, vh, vk)],
                    band[right(vc, band_row(vr, vkh), vs, vl, ve, vk)],
                )
        if NHWC:
            sums = made("float32", RC, GROUPS, R, 2, 32, 2)
            by_places("sums", HELD, order, acc, sums)
        if has_residual:
            held = made(dtype, *own(RC, GROUPS, R, 32, 2, 2))
            if STAGED:
                beside = made(dtype, *leaving.shape)
                fill("beside", "c p i f v", beside, stage, operands["residual"], LEAVING, OH, OW)
                by_places("residual", HELD, take_up, beside, held)
            else:
                by_places("residual", HELD, take, operands["residual"], held)
        results = T.meta_var(sums if NHWC else acc)
        taken = T.meta_var(operands | {"residual": held} if has_residual else operands)
        by_places("epilogue", HELD, end, results, taken, rounded)
        if PAIRED:
            by_places("store", HELD_PAIRS, store_pair, rounded, out)
        elif STAGED:
            by_places("store", HELD, leave, rounded, leaving)
            by_places("spread", dict(zip("cpifv", leaving.shape, strict=True)), spread, leaving, out)
        else:
            by_places("store", HELD, store, rounded, out)

    return banded
