"""Stretches of buffers, and copies of them that the threads of a block share.

What is here writes statements while a script is parsed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from ..cuda_functions import AWAIT

_TOGETHER = 32
"""Elements of a channel that threads side by side copy together, if each has but one channel."""

_MOST_TURNS = 64
"""Pixels of a thread that are copied one by one in the source."""

UNROLLED = {"pragma_auto_unroll_max_step": 1 << 20, "pragma_unroll_explicit": 0}


class Part:
    """A stretch of a buffer, indexed from 0 on. A copy may go on past the ends of rows."""

    def __init__(self, buffer, *first: Any) -> None:
        self.buffer, self._first = buffer, first

    def at(self, index: Any) -> tuple[Any, ...]:
        *others, last = self._first
        return (*others, last + index)

    def __getitem__(self, index: Any) -> tirx.Expr:
        return self.buffer[self.at(index)]

    def store(self, index: Any, value: Any) -> None:
        T.buffer_store(self.buffer, value, self.at(index))

    def take(self, index: Any, source: "Part", place: Any) -> None:
        """Store an element of another stretch, in this one's dtype."""
        self.store(index, T.cast(source[place], self.buffer.dtype))

    def add(self, index: Any, value: Any) -> None:
        self.store(index, self[index] + value)


class Row:
    """A row of a buffer that is indexed as if it were a buffer itself."""

    def __init__(self, buffer, place: int) -> None:
        self._buffer, self._place = buffer, place

    def __getitem__(self, indices: tuple[Any, ...]) -> tirx.Expr:
        place = (self._place, *indices)
        return self._buffer[place]


def all_hold(*conditions: Any) -> Any:
    """Tell whether all conditions hold, as a number, of which TVM infers no bounds."""
    return T.cast(tirx.all(*conditions), "int32") != 0


def untold() -> None:
    """Say nothing of what a block reads and writes, for TVM to order it by."""
    T.reads()
    T.writes()


def use(how: str, buffers: Iterable[tirx.Buffer]) -> None:
    """Let TVM see a use of shared memory, ``"r"`` or ``"w"``: what is not used before or later may lie over it.

    It sees no copies, nor that other warps are not yet done with what one reads for the last time.
    """
    for buffer in buffers:
        T.evaluate(buffer.access_ptr(how))


def local(dtype: str, *extents: Any, scope: str = "local") -> tirx.Buffer:
    """Allocate registers of a thread, or memory of another scope."""
    return T.sblock_alloc_buffer(extents, dtype, scope=scope)


dynamic, static, made = (partial(local, scope=scope) for scope in ("shared.dyn", "shared", "global"))
"""Allocate shared memory of a block, dynamic and static; and what belongs to all."""


def unrolled(*extent: Any) -> Any:
    """Begin a loop that the CUDA compiler unrolls."""
    return T.serial(*extent, annotations=UNROLLED)


def by_lanes(name: str, warps: int, *work: Any, outer: Sequence[tirx.Var] = ()) -> None:
    """Let each lane of each warp do its share of some work, as `by_places`."""
    by_places(name, {"w": warps, "lane": 32}, *work, outer=outer)


def fill(name: str, loops: str, buffer: tirx.Buffer, value: Callable[..., Any], *about: Any) -> None:
    """Compute each element of a buffer in a block, in loops of such names, from what it is about and its place."""

    def store(*place: Any):
        T.buffer_store(buffer, value(*about, *place), place)

    by_places(name, dict(zip(loops.split(), buffer.shape, strict=True)), store)


def swapped(buffer: tirx.Buffer, *place: Any) -> tirx.Expr:
    """Read a buffer with the last two indices exchanged."""
    *others, one, other = place
    at = (*others, other, one)
    return buffer[at]


def by_places(
    name: str,
    extents: dict[str, int],
    work: Callable[..., None],
    *about: Any,
    outer: Sequence[tirx.Var] = (),
    reduced: int = 0,
) -> None:
    """Do some work at each place, of threads for one, in a block that may depend on loops around.

    The work is given what it is about, and the places in the loops around and in its own, of which it sums over
    the last ones, if any are `reduced`.
    """
    with T.grid(*extents.values()) as inner, T.sblock(name):
        loops = [*outer, *map(IRBuilder.name, extents, inner)]
        axes = T.axis.remap("S" * (len(loops) - reduced) + "R" * reduced, loops)
        for loop, axis in zip(loops, axes, strict=True):
            IRBuilder.name(f"v{loop.name[0]}", axis)
        work(*about, *axes)


@contextmanager
def by_lane(name: str) -> Iterator[Any]:
    """Begin a block of each lane of a warp, and give the lane."""
    with T.serial(32) as lane, T.sblock(name):
        yield T.axis.spatial(32, lane)


def commit_copies() -> None:
    """Put the copies begun so far in a group."""
    T.evaluate(T.ptx["cp.async.commit_group"]())


def wait_for_copies(but: int) -> None:
    """Wait for this thread's copies but those of the last groups."""
    T.evaluate(T.ptx["cp.async.wait_group"](but))


def synchronise() -> None:
    """Let the threads of a block wait for each other."""
    T.evaluate(T.tvm_storage_sync("shared.dyn"))


def begin_barrier(barrier: tirx.Buffer, threads: int, thread: Any) -> None:
    """Begin a barrier of so many threads, by the first of them."""
    with when(thread == 0):
        T.evaluate(T.ptx["mbarrier.init.shared.b64"](T.address_of(barrier[0]), threads))


def arrive(barrier: tirx.Buffer) -> None:
    """Say that this thread is at the barrier, without a wait."""
    T.evaluate(T.ptx["mbarrier.arrive.shared.b64"](T.address_of(barrier[0])))


def wait(barrier: tirx.Buffer, number: Any) -> None:
    """Wait until all have arrived in the last phase that is odd or even as the number is; phase 0 is the first."""
    T.evaluate(T.call_extern("int32", AWAIT, T.address_of(barrier[0]), number % 2))


@contextmanager
def when(*conditions: Any) -> Iterator[None]:
    """Do what follows where all conditions hold, if there are any."""
    with T.If(tirx.all(*conditions, tirx.const(True, "bool"))), T.Then():
        yield


def clear(sums: Part, first: int, end: int) -> None:
    """Make sums zero, from one to before another."""
    with unrolled(first, end) as place:
        sums.store(place, T.float32(0))


def move(source: Part, target: Part, count: int, lanes: int) -> None:
    """Move what lies side by side between shared memory and registers, in vectors."""
    with unrolled(count // lanes) as place, T.vectorized(lanes) as lane:
        index = place * lanes + lane
        target.store(index, source[index])


def copy_vector(source: tirx.Buffer, first: Any, target: tirx.Buffer, to: Any, lanes: int) -> None:
    """Copy so many elements at once."""
    with T.vectorized(lanes) as lane:
        T.buffer_store(target, source[first + lane], [to + lane])


def copy(
    channels: tuple[int, Any],
    whole: Part,
    shared: Part,
    sizes: tuple[int, int, int],
    threads: tuple[int, Any],
    *,
    is_load: bool = True,
) -> None:
    """Copy a thread's share of what lies side by side to shared memory, or back; see `share`."""
    for place, apart, _ in share(channels, sizes, threads, is_load=is_load):
        if is_load:
            shared.take(apart, whole, place)
        else:
            whole.take(place, shared, apart)


def copy_pixels(
    channel: tuple[Any, Any, int], whole: Part, shared: Part, sizes: tuple[int, int], threads: tuple[int, Any]
) -> None:
    """Copy a thread's pixels of an NHWC image to a plane in shared memory.

    `channel` is the thread's, with those of the block that there are and those of a pixel; `sizes` are a plane's
    pixels, and from one to the next; the rest is as for `share`.
    """
    (own, count, apart), (size, stride), (each, thread) = channel, sizes, threads

    def one(turn: Any):
        pixel = thread + turn * each
        shared.take(own * stride + pixel, whole, pixel * apart + tirx.min(own, count - 1))

    turns, over = divmod(size, each)
    if turns > _MOST_TURNS:
        with T.serial(turns) as turn:
            one(turn)
    else:
        for turn in range(turns):
            one(turn)
    if over:
        with when(thread < over):
            one(turns)


def share(
    channels: tuple[int, Any], sizes: tuple[int, int, int], threads: tuple[int, Any], *, is_load: bool = True
) -> Iterator[tuple[Any, Any, Any]]:
    """Deal what lies side by side out to threads, and go through a thread's share in vectors.

    Where channels lie apart in shared memory, and have threads enough, a thread has a share of one. `channels` are the
    block's, and those that there are; `sizes` the elements of a channel, from one to the next in shared memory, and of
    a vector; `threads` all, and the number of this one. Yields an element's place side by side, in shared memory, and
    among the thread's own.

    In place of channels that are not there the last is loaded: ptxas moves no load ahead of a store under another
    test, so that each would wait for the one before.
    """
    (most, count), (size, stride, lanes), (all_threads, thread) = channels, sizes, threads
    each = all_threads // most
    end, is_whole = (most if is_load else count), isinstance(count, int)
    if stride == size or each * lanes < _TOGETHER:
        last = tirx.floordiv(count * size, lanes) - 1
        for turn in range(-(-most * size // (lanes * all_threads))):
            number = thread + turn * all_threads
            place = number * lanes
            source = tirx.min(number, last) * lanes if is_load and not is_whole else place
            apart = place if stride == size else place // size * stride + place % size
            with when(place < end * size), T.vectorized(lanes) as lane:
                yield source + lane, apart + lane, turn * lanes + lane
        return
    channel, first = tirx.floordiv(thread, each), tirx.floormod(thread, each)
    there = tirx.min(channel, count - 1) if is_load and not is_whole else channel
    for turn in range(-(-size // (lanes * each))):
        place = (first + turn * each) * lanes
        with when(place < size, channel < end), T.vectorized(lanes) as lane:
            place += lane
            yield there * size + place, channel * stride + place, turn * lanes + lane
