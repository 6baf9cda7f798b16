"""Functions in CUDA C++ that generated code calls, and what TVM's own text lacks for it to compile well."""

import re

from .line_loads import DEFINITION, LOAD

# TVM includes cuda_bf16.h from sm_80 on, yet uses the type everywhere. The
# header itself serves older architectures, by way of float32.
_BFLOAT16 = """
#if __CUDA_ARCH__ < 800
#include <cuda_bf16.h>
__device__ inline nv_bfloat16 max(nv_bfloat16 a, nv_bfloat16 b) { return __hgt(a, b) ? a : b; }
__device__ inline nv_bfloat16 min(nv_bfloat16 a, nv_bfloat16 b) { return __hlt(a, b) ? a : b; }
#endif
"""

# There TVM shifts vectors of 8 bfloat16, and makes the vector of 16s by which with a function that takes 4 numbers.
_EIGHT_WORDS = f"""
__device__ inline ulonglong4 make_ulonglong4({", ".join(f"unsigned {name}" for name in "abcdefgh")}) {{
  alignas(32) unsigned words[8] = {{a, b, c, d, e, f, g, h}};
  return *(ulonglong4*)words;
}}
"""

SILU, SILU_BY_FMA, SILU_FACTOR = "dwtir_silu", "dwtir_silu_by_fma", -1.44269504
"""Functions that sources may call: of x times the factor, x by its sigmoid, in float32.

They err by a few ulp, as the device's exponentials do; one too small for a normal number is 0, and added to 1. The
first takes 4 instructions, a rounded division alone a call. The second divides by products and sums, of which an SM has
eight times as many at a time as reciprocals: half of the results each way take the least time. It begins with the
exponent turned round, right to 5 %."""

_SILU = f"""
__device__ inline float {SILU}(float scaled) {{
  float power, share;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(scaled));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"({SILU_FACTOR}f + power * {SILU_FACTOR}f));
  return scaled * share;
}}
__device__ inline float {SILU_BY_FMA}(float scaled) {{
#if __CUDA_ARCH__ < 800
  return {SILU}(scaled);
#else
  float power;
  asm("min.NaN.f32 %0, %0, 126.0;" : "+f"(scaled));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(scaled));
  float sum = {SILU_FACTOR}f + power * {SILU_FACTOR}f;
  float share = __int_as_float(0x7EF311C7 - __float_as_int(sum));
  float error = 1.0f - sum * share;
  share += share * error;
  error = 1.0f - sum * share;
  share = scaled * share;
  return share + share * (error + error * error);
#endif
}}
"""

MAX, MIN = "dwtir_max", "dwtir_min"
"""Functions that sources may call: the greater and the lesser of two float32, NaN if the second is."""

_BOUNDS = "".join(
    f"""
__device__ inline float {name}(float a, float b) {{
#if __CUDA_ARCH__ < 800
  return a {sign} b ? a : b;
#else
  asm("{name[-3:]}.NaN.f32 %0, %0, %1;" : "+f"(a) : "f"(b));
  return a;
#endif
}}
"""
    for name, sign in ((MAX, ">"), (MIN, "<"))
)

WORD, HALF_OF = "dwtir_word", "dwtir_half_of"
"""Functions of a pair of halves, as a word, that sources may call: the pair, and the first or the second alone.

ptxas gathers a product's operands, four registers, anew each time if it knows that they are loaded ones; what it takes
for computed, once: a third fewer instructions."""

_WORD = f"""
__device__ inline unsigned int {WORD}(unsigned int pair) {{
  asm("xor.b32 %0, %0, %1;" : "+r"(pair) : "r"(gridDim.y - 1));
  return pair;
}}
"""

WORD_AT = "dwtir_word_at"
"""A function that sources may call: the pair of halves at a place."""

_WORD_AT = f"""
__device__ inline unsigned int {WORD_AT}(const void* place) {{ return *(const unsigned int*)place; }}
"""

_HALF_OF = f"""
__device__ inline unsigned int {HALF_OF}(unsigned int pair, int second) {{
  return pair & (second ? 0xffff0000 : 0xffff);
}}
"""

WAIT = "dwtir_wait"
"""A function that sources for sm_90 may call: waits until the kernel before has ended, and is true.

ptxas moves loads of what it takes for constant ahead of the instruction, but none ahead of a test."""

_WAIT = f"""
__device__ inline int {WAIT}() {{
  unsigned int blocks;
  asm volatile("griddepcontrol.wait; mov.u32 %0, %%nctaid.x;" : "=r"(blocks) :: "memory");
  return blocks != 0;
}}
"""

AWAIT = "dwtir_await"
"""A function that sources for sm_80 on may call: waits until a phase of a parity has ended of a barrier in shared
memory. TVM's own needs sm_90."""

_AWAIT = f"""
#if __CUDA_ARCH__ >= 900
#define DWTIR_LOOK "mbarrier.try_wait.parity.shared.b64"
#else
#define DWTIR_LOOK "mbarrier.test_wait.parity.shared.b64"
#endif
__device__ inline void {AWAIT}(void* barrier, int parity) {{
  unsigned ended;
  do {{
    asm volatile("{{ .reg .pred p; " DWTIR_LOOK " p, [%1], %2; selp.u32 %0, 1, 0, p; }}"
      : "=r"(ended) : "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(parity) : "memory");
  }} while (!ended);
}}
"""

APART = "dwtir_apart"
_APART = f"""
__device__ inline int {APART}(int thread) {{
  asm("prmt.b32 %0, %0, 0, 0x3210;" : "+r"(thread));
  return thread;
}}
"""

FROM = "dwtir_from"
"""A function that sources may call: of two pairs of halves, as words, the second and the third, or the first pair."""

_FROM = f"""
__device__ inline unsigned int {FROM}(unsigned int first, unsigned int second, bool odd) {{
  return __funnelshift_r(first, second, odd ? 16 : 0);
}}
"""

# TVM includes it in every kernel that uses tensor cores, whose instructions it writes itself.
_UNUSED_HEADER = "#include <mma.h>"

# Copies, TVM's and ours, for L2 to fetch lines.
_COPY = re.compile(r"(cp\.async\.c[ag]\.shared\.global) \[")

# TVM's vector of four halves copies them one by one. Under a condition, as every load has
# that may lie in the padding, that takes two instructions a half; as two words it takes none.
_FOUR_HALVES = "half4_bfloat164(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}"
_COPIED_AS_WORDS = """
  __device__ half4_bfloat164(const half4_bfloat164& other) { *this = other; }
  __device__ half4_bfloat164& operator=(const half4_bfloat164& other) {
    *(uint2*)this = *(const uint2*)&other;
    return *this;
  }
"""


def with_functions(source: str) -> str:
    """Add what a source of TVM's code generator calls, and mend what it has."""
    source = _told_apart(source)
    for name, text in (
        ("bfloat16", _BFLOAT16),
        ("make_ulonglong4", _EIGHT_WORDS),
        (SILU, _SILU),
        (MAX, _BOUNDS),
        (WORD, _WORD),
        (WORD_AT, _WORD_AT),
        (HALF_OF, _HALF_OF),
        (WAIT, _WAIT),
        (AWAIT, _AWAIT),
        (APART, _APART),
        (FROM, _FROM),
        (LOAD, DEFINITION),
    ):
        if name in source:
            source = f"{text}#line 1\n{source}"
    source = _COPY.sub(r"\1.L2::128B [", source.replace(_UNUSED_HEADER, ""))
    return source.replace(_FOUR_HALVES, _FOUR_HALVES + _COPIED_AS_WORDS)


def _told_apart(source: str) -> str:
    """Hide that places of floats in shared memory are multiples of a thread, where there are halves.

    Before CUDA 13.1 ptxas takes the place `x * 6` of halves for one of floats where floats lie at `x * 17`.
    """
    floats = "|".join(re.findall(r"__shared__ \S+ float (\w+)\[", source))
    if not floats or not re.search("half|bfloat16", source):
        return source
    parts = "|".join(re.findall(r"\bcse_\w+", " ".join(re.findall(rf"\b(?:{floats})\[.*\]", source))))
    lines = rf"(?m)^(?: *int (?:{parts}) =|.*\b(?:{floats})\[).*"
    thread = r"\(\(int\)(threadIdx\.\w)\)(?= \*)"
    return re.sub(lines, lambda line: re.sub(thread, rf"{APART}(\1)", line[0]), source)
