"""Traces in the few characters that a record has room for: deflate, then base 85.

It begins with a dictionary, `data/traces.txt.xz`: a trace of each strategy that most records
are of. What a new trace repeats of it, which is nearly all, takes no room. Places in it are
counted from its end, so that traces of later strategies may be put before the others, up to
32 KB in all; what is there does not change, for packed records need it.
"""

import base64
import lzma
import zlib
from functools import cache
from importlib.resources import files as package_files

from . import files
from .errors import RecordError
from .traces import TraceJson, dump

_MAX_BYTES = 1 << 16
_RAW = -15
"""Deflate without zlib's head and checksum: what is unpacked is compared with what it must be."""


@cache
def _dictionary() -> bytes:
    return lzma.decompress((package_files("dwtir") / "data" / "traces.txt.xz").read_bytes())


def pack(trace: TraceJson) -> str:
    """Write a trace's JSON in about a thirtieth of its characters."""
    deflate = zlib.compressobj(9, wbits=_RAW, zdict=_dictionary())
    return base64.b85encode(deflate.compress(dump(trace).encode()) + deflate.flush()).decode()


def unpack(text: str) -> object:
    """Return the JSON value that `pack` wrote, or anybody; a `RecordError` if it is damaged."""
    try:
        inflate = zlib.decompressobj(_RAW, _dictionary())
        data = inflate.decompress(base64.b85decode(text), _MAX_BYTES)
    except (zlib.error, ValueError) as error:
        raise RecordError(f"the trace must be JSON or packed JSON: {error}") from error
    if not inflate.eof or inflate.unused_data:
        raise RecordError(f"the packed trace must be whole and at most {_MAX_BYTES} bytes")
    return files.parse_json(data)
