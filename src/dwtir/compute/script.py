"""TVMScript's decorator for functions that are made anew for every shape."""

import contextlib
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache
from types import CodeType
from typing import Any

from tvm import IRModule, tirx
from tvm.s_tir import analysis
from tvm.script.ir_builder import IRBuilder
from tvm.script.parser._core import Parser, doc, utils
from tvm.script.parser.core.diagnostics import Source
from tvm.tirx.script.parser.entry import TIRInline


def prim_func(*, s_tir: bool) -> Callable[[Callable[..., None]], tirx.PrimFunc]:
    """Do what `T.prim_func` does, in a fifth of the time, for functions inside of functions.

    That one looks at all frames of the stack and the module's whole source, makes the syntax tree three times, and
    notes where parts stand. Here errors name no file, and what an annotation alone uses is looked for in the function
    around. The parser reads `s_tir` in the source: the function has blocks to schedule.
    """

    def decorate(function: Callable[..., None]):
        variables = sys._getframe(1).f_locals | utils.inspect_function_capture(function)
        parser = _Parser(_source(function.__code__))
        token = _parser.set(parser)
        try:
            with IRBuilder() as builder:
                parser.parse(variables)
        finally:
            _parser.reset(token)
        func = builder.get()
        analysis.verify_well_formed(IRModule.from_expr(func))
        return func

    decorate.dispatch_token = "tirx"  # type: ignore[attr-defined]  # the parser asks for it
    return decorate


class _Inline(TIRInline):
    """A part of a script, which knows the parser without a search in every frame."""

    def _find_parser_def(self) -> Any:
        return _parser.get()

    def parse_macro(self, parser: "_Parser") -> None:
        self.call_count = parser.uses[self]  # blocks have other names from the second use in a function on
        parser.uses[self] += 1
        super().parse_macro(parser)


def inline(function: Callable[..., None]) -> Callable[..., None]:
    """Do what `T.inline` does outside of a function of TVMScript, in a small part of the time."""
    return _Inline(_source(function.__code__), utils.inspect_function_capture(function), function)


class _Source(Source):
    """A function, its decorator included; its syntax tree is made once."""

    def __init__(self, code: CodeType) -> None:
        super().__init__(textwrap.dedent(inspect.getsource(code)))
        self._tree = super().as_ast()

    def as_ast(self) -> doc.AST:
        return self._tree


_source = lru_cache(maxsize=64)(_Source)


class _Parser(Parser):
    """Notes no places in the source."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, {})
        self.uses: Counter[_Inline] = Counter()

    def with_source_span(self, node: doc.AST) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def annotate_current_source_span(self, value: Any) -> Any:
        return value


_parser: ContextVar[_Parser] = ContextVar("parser")
"""The parser of the script that is read in this thread."""
