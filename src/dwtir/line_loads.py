"""Loads of inputs for which L2 fetches the 128 bytes around, not 64, in place of those in TVM's source.

Under predicates what is constant of a place is in the instruction, for NVVM would compute each place anew.
"""

import re
from collections import Counter

LOAD, PLAIN = "dwtir_load", "DWTIR_PLAIN"
"""A function that sources may call: loads from some bytes beyond a place, or is 0 if nothing is there. If the macro is
defined loads are TVM's, whose addresses may take fewer registers."""

DEFINITION = f"""
#define DWTIR_LD(type, to, at, skip, test, ...) \\
  asm("{{.reg .pred p; setp.ne.b32 p, " test ", 0; @p ld.global.nc.L2::128B." type to ", [" at " + " skip "];}}" \\
      : __VA_ARGS__ : "l"(place), "n"(SKIP), "r"((int)is_there))
template <int SKIP, class T> __device__ inline T {LOAD}(const T* place, bool is_there = true) {{
  alignas(16) unsigned to[4] = {{}};
  static_assert(sizeof(T) <= 16);
  if constexpr (sizeof(T) == 2) DWTIR_LD("b16 ", "%0", "%1", "%2", "%3", "+h"(*(short*)to));
  if constexpr (sizeof(T) == 4) DWTIR_LD("b32 ", "%0", "%1", "%2", "%3", "+r"(*to));
  if constexpr (sizeof(T) == 8) DWTIR_LD("v2.b32 ", "{{%0, %1}}", "%2", "%3", "%4", "+r"(*to), "+r"(to[1]));
  if constexpr (sizeof(T) == 16)
    DWTIR_LD("v4.b32 ", "{{%0, %1, %2, %3}}", "%4", "%5", "%6", "+r"(*to), "+r"(to[1]), "+r"(to[2]), "+r"(to[3]));
  return *(T*)to;
}}
"""

_KERNEL = 'extern "C"'
_INPUT = r"(?:data|grad_out)_ptr"
# To the fourth parenthesis in another; more stay as they are.
_WITHIN = r"[^()]*"
for _ in range(4):
    _WITHIN = rf"(?:[^()]|\({_WITHIN}\))*"
_LOADED = re.compile(rf"(?<![&(\w])({_INPUT})\[((?:[^][]|\[[^][]*\])+)\]|\*(\(\w+\*\))\(({_INPUT}) \+ ({_WITHIN})\)")
_TESTED = re.compile(
    r"if \((?P<test>.+)\) {\n\s*(?P<to>\w+ = )"
    rf"(?P<load>(?:{_LOADED.pattern});)\n\s*}} else {{\n\s*(?P=to)[\w(), ]*0x0p\+0f.*;\n\s*}}"
)
_DEFINED = re.compile(r"int (\w+) = (.+);")
_MOVED = re.compile(r"\((.+) ([+-]) (\d+)\)")


def by_lines(source: str) -> str:
    """Load the inputs of TVM's source by `LOAD`, vectors and single elements.

    Tests of what is there become predicates, but before products on tensor cores, which take 1 to 7 % longer so.
    """
    head, *kernels = source.split(_KERNEL)
    plain, lines = (_KERNEL.join(["", *found]) for found in (kernels, map(_loaded, kernels)))
    return f"{head}#ifdef {PLAIN}\n{plain}#else\n{lines}#endif\n"


def _loaded(kernel: str) -> str:
    in_branches = "mma.sync" in kernel
    defined = _DEFINED.findall(kernel)
    names = Counter(name for name, _ in defined)
    known = {name: _apart(value, {}) for name, value in defined if names[name] == 1}

    def load(found: re.Match[str], test: str = "") -> str:
        one, at, kind, several, to = found.groups("")
        first, skip = (at or to, 0) if in_branches else _apart(at or to, known)
        name = one or several
        return f"{LOAD}<{skip} * (int)sizeof(*{name})>({kind}({name} + {first}){test})"

    def tested(found: re.Match[str]) -> str:
        return found["to"] + _LOADED.sub(lambda one: load(one, f", {found['test']}"), found["load"])

    return _LOADED.sub(load, kernel if in_branches else _TESTED.sub(tested, kernel))


def _apart(index: str, known: dict[str, tuple[str, int]]) -> tuple[str, int]:
    """Part an index, in which TVM puts each operation in parentheses, into what is computed and a constant."""
    found = _MOVED.fullmatch(index)
    first, skip = (found[1], int(found[2] + found[3])) if found else (index, 0)
    name, _, times = first.strip("()").partition(" * ")
    if known.get(name, ("", 0))[1] and (times or "1").isdecimal():
        base, more = known[name]
        return f"({base}) * {times or 1}", skip + more * int(times or 1)
    return first, skip
