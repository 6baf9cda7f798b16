"""TVMScript's decorator for functions that are made anew for every shape."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import lru_cache
from types import CodeType
from typing import Any

from tvm import tirx
from tvm.script.parser._core import parse, scan_macro, utils
from tvm.tirx.script.parser.entry import TIRInline

__all__ = ["inline", "prim_func"]


def prim_func(*, s_tir: bool) -> Callable[[Callable[..., None]], tirx.PrimFunc]:
    """Do what `T.prim_func` does, in half the time, for functions inside of functions.

    That one asks for every frame of the stack, twice, and for the source of the whole
    module. Here an error names no file, and what an annotation alone uses is looked
    for in the function around.

    Parameters
    ----------
    s_tir : bool
        Whether the function has blocks to schedule; the parser reads it in the source.
    """

    def decorate(function: Callable[..., None]) -> tirx.PrimFunc:
        variables = utils.inspect_function_capture(function)
        return parse(_source(function.__code__), sys._getframe(1).f_locals | variables)

    decorate.dispatch_token = "tirx"  # type: ignore[attr-defined]  # the parser asks for it
    return decorate


class _Inline(TIRInline):  # type: ignore[misc]
    """A part of a script, which finds the parser without the source of every frame."""

    def _find_parser_def(self) -> Any:
        frame = inspect.currentframe()
        while frame is not None:
            if parser := frame.f_globals.get(self.parser_object_name):
                return parser
            frame = frame.f_back
        raise RuntimeError("what is inline is called in a script only")


def inline(function: Callable[..., None]) -> Callable[..., None]:
    """Do what `T.inline` does outside of a function of TVMScript, in a small part of the time."""
    variables = utils.inspect_function_capture(function)
    return _Inline(*scan_macro(_source(function.__code__), variables), function)


@lru_cache(maxsize=64)
def _source(code: CodeType) -> str:
    """Return the text of a function, its decorator included."""
    return textwrap.dedent(inspect.getsource(code))
