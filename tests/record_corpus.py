"""Damaged and hostile tuning records; as a program, says what comes of reading some."""

import base64
import json
import math
import random
import sys
import zlib
from itertools import product
from pathlib import Path

HUGE = (2**31 - 1, 2**31, 2**63, 2**64, 10**30, -1, 0)
WRONG = (None, True, -1, 0, 1.5, "", "x", [], {}, [[]], "\ud800", 10**400)


def corpus(record):
    yield from _bytes(json.dumps(record).encode())
    for name, changed in _values(record):
        yield name, json.dumps(changed).encode()


def _bytes(good):
    generator = random.Random(0)
    for cut in range(0, len(good), max(1, len(good) // 40)):
        yield f"cut at {cut}", good[:cut]
    for number in range(80):
        damaged = bytearray(good)
        damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        yield f"flip {number}", bytes(damaged)
    yield "zeros", bytes(len(good))
    yield "noise", generator.randbytes(2000)
    yield "utf-16", good.decode().encode("utf-16")
    yield "twice", good + good
    yield "large", good + b" " * 10_000
    yield "deep", b"[" * 8000
    yield "deep object", b'{"a":' * 1500 + b"1" + b"}" * 1500
    yield "digits", b'{"schema":' + b"1" * 8000 + b"}"
    yield "repeated name", good[:-1] + b',"trials": 2}'
    for constant in (b"NaN", b"Infinity", b"-Infinity", b"1e999"):
        first = b'"run_secs": ['
        yield f"time {constant!r}", good.replace(first, first + constant + b", ")
        yield f"whole {constant!r}", constant


def _values(record):
    def changed(name, value, part=None):
        whole = value if part is None else record[name] | {part: value}
        return f"{name} {part} = {repr(value)[:40]}", record | {name: whole}

    for value in (None, 1, "record", [record], {"record": record}):
        yield f"instead: {type(value).__name__}", value
    for name in record:
        if name not in ("seed", "shape", "device"):  # left out, it is 0, or in the path
            yield f"without {name}", {key: value for key, value in record.items() if key != name}
        allowed = {"seed": (None, -1, 0, 1), "trials": (-1, 0, 1), "manual_median_secs": (None, 1.5)}.get(name, ())
        yield from (changed(name, value) for value in WRONG if value is True or value not in allowed)
    yield "extra", record | {"code": "__import__('os').system('false')"}
    large = "2147483647x1x1x1_k1x1_s1x1_p0x0x0x0_d1x1_m1_float32_nchw"
    parameters = record["parameters"]
    more = parameters | {"x": 1}
    for name, values in {
        "shape": ("1x8x9x9_k3_psame", "1x8x9x10_k3x3", "0x0x0x0_k0", "../../etc/passwd", "9" * 190, large),
        "schema": (0, 1, 3, "2", 2.0, True),
        "device": ("nvidia-h200", "cpu-other", "../cpu", "CPU", "a/b"),
        "parameters": ("1, 1", "1, 1, 1, 1", "1, 1, x", "1,,1", "1, 1, 0", "9, 1, " + "9" * 5000, {}, more),
        "strategy": ("shared_tile", "magic", "__class__"),
    }.items():
        yield from (changed(name, value) for value in values)
    for name, value in product(parameters, (*HUGE, 4097, True, 1.0, "1", None, [1])):
        yield changed("parameters", value, name)
    for name, value in product(record["target"].keys() - {"bandwidth", "fp32_rate"}, (10**9, -5, "x" * 300, None, {})):
        yield changed("target", value, name)
    for name, value in product(("bandwidth", "fp32_rate"), (0, -1.0, math.inf, "1", True)):
        yield changed("target", value, name)
    yield from _traces(record)


def _traces(record):
    steps, decisions = record["trace"]

    def trace(name, *parts):
        return f"trace {name}", record | {"trace": list(parts)}

    for foreign in ("EnterPostproc", "TransformLayout", "Tensorize", "UnsafeSetDType", "", 7, None):
        yield trace(f"foreign {foreign}", [[foreign, [], [], []], *steps], decisions)
    for choice in (-1, 7, 99, 2**31, 2**63, -(2**63), 2**64, 10**30, 0.0, "0", True, None):
        yield trace(f"choice {choice!r}", steps, [[0, choice], *decisions[1:]])
    for index in (-1, 5, len(steps), 2**40, "0", None, 1):
        yield trace(f"of {index!r}", steps, [[index, 0], *decisions[1:]])
    yield trace("other choice", steps, [[0, (decisions[0][1] + 1) % 2], *decisions[1:]])
    yield trace("no decisions", steps, [])
    yield trace("repeated decision", steps, [decisions[0], *decisions])
    yield trace("nothing", [], [])
    yield trace("three", steps, decisions, [])
    yield trace("reversed", steps[::-1], decisions)
    yield trace("long", [["GetLoops", [], [], []]] * 600, [])
    for number, step in enumerate(steps[:12]):
        before, after = steps[:number], steps[number + 1 :]
        yield trace(f"without {number}", before + after, decisions)
        yield trace(f"short {number}", [*before, step[:3], *after], decisions)
    for block in ("root", "other", 3, None):
        yield trace(f"block {block}", [*steps, ["GetSBlock", [], [block, "main"], ["b9"]]], decisions)
    for factors in ([10**12], [2**31], [0], [-1], [], ["x"], [1.5]):
        step = ["SampleCategorical", [], [factors, [1.0] * len(factors)], ["v0"]]
        yield trace(f"factors {factors}", [step, *steps[1:]], decisions)

    good = json.dumps(record["trace"]).encode()
    packed = zlib.compress(good)
    for name, data in (
        ("nothing", b""),
        ("no zlib", good),
        ("cut", packed[:-8]),
        ("damaged", packed[:-1] + b"x"),
        ("and more", packed + b"more"),
        ("large", zlib.compress(good + b" " * 10_000_000)),
        ("deep", zlib.compress(b"[" * 8000)),
        ("no JSON", zlib.compress(b"trace")),
        ("other", zlib.compress(json.dumps([steps, []]).encode())),
    ):
        yield f"packed {name}", record | {"trace": base64.b85encode(data).decode()}
    yield "packed wrongly", record | {"trace": "\u00e9 '"}


def main(folder):
    from dwtir import RecordError
    from dwtir.records import Record

    for path in Path(folder).rglob("*.json"):
        reason = None
        try:
            Record.read(path)
        except RecordError as error:
            reason = str(error)
        print(json.dumps([str(path), reason]))


if __name__ == "__main__":
    main(sys.argv[1])
