"""The two orders that the indices of an image have, for a definition that stands once for both."""

from collections.abc import Callable
from typing import Any

_Order = Callable[..., tuple[Any, ...]]


def order_of(layout: str) -> tuple[_Order, _Order]:
    """Give what puts image, channel, row and column in the order of the layout, and what takes them out of it."""
    places = (0, 1, 2, 3) if layout == "NCHW" else (0, 2, 3, 1)
    taken = tuple(places.index(axis) for axis in range(4))
    return lambda *named: tuple(named[axis] for axis in places), lambda *laid: tuple(laid[axis] for axis in taken)


def weight_at(layout: str, channel: tuple[Any, Any], tap: tuple[Any, Any]) -> tuple[Any, ...]:
    """Put the channel and its filter, and the row and column of a tap, in the order of the layout's weights."""
    return channel + tap if layout == "NCHW" else tap + channel
