"""TVMScript's decorator for functions that are made anew for every shape."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from types import CodeType
from typing import Any

from tvm import IRModule, tirx
from tvm.s_tir import analysis
from tvm.script.ir_builder import IRBuilder
from tvm.script.parser._core import Parser, doc, utils
from tvm.script.parser.core.diagnostics import Source
from tvm.script.parser.core.evaluator import _eval_op, eval_expr
from tvm.tirx.script.parser.entry import TIRInline


def prim_func(*, s_tir: bool) -> Callable[[Callable[..., None]], tirx.PrimFunc]:
    """Do what `T.prim_func` does, in a third of the time, for functions inside of functions.

    That one looks at every frame of the stack, twice, and at the source of the whole module; makes
    the syntax tree three times; notes where every part stands; and compiles every operand. Here an
    error names no file, and what an annotation alone uses is looked for in the function around. The
    parser reads `s_tir` in the source: the function has blocks to schedule.
    """

    def decorate(function: Callable[..., None]) -> tirx.PrimFunc:
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

    def parse_macro(self, parser: _Parser) -> None:
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
    """Notes no places in the source, and looks up what an expression is without compiling it."""

    def __init__(self, source: Source) -> None:
        super().__init__(source, {})
        self.uses: Counter[_Inline] = Counter()

    def with_source_span(self, node: doc.AST) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def annotate_current_source_span(self, value: Any) -> Any:
        return value

    def eval_expr(self, node: doc.AST, extra_vars: Mapping[str, Any] | None = None) -> Any:
        return self._value(node, self.var_table.get() | (extra_vars or {}))

    def eval_assign(
        self, target: doc.AST, source: Any, bind_value: Any, allow_shadowing: bool = False
    ) -> dict[str, Any]:
        if not isinstance(target, doc.Name):
            return super().eval_assign(target, source, bind_value, allow_shadowing)  # type: ignore[no-any-return]
        bound = bind_value(self, target, target.id, source)
        self.var_table.add(target.id, bound, allow_shadowing)
        return {target.id: source}

    def _value(self, node: Any, values: dict[str, Any]) -> Any:
        """Evaluate an expression as TVM's evaluator does, operators by what TVM has them mean."""

        def value(part: Any) -> Any:
            return self._value(part, values)

        def each(parts: list[Any]) -> Iterator[Any]:
            for part in parts:
                if isinstance(part, doc.Starred):
                    yield from value(part.value)
                else:
                    yield value(part)

        match node:
            case doc.Constant():
                return node.value
            case doc.Name():
                return values[node.id] if node.id in values else getattr(builtins, node.id)
            case doc.Attribute():
                return getattr(value(node.value), node.attr)
            case doc.Subscript():
                return value(node.value)[value(node.slice)]
            case doc.Slice():
                parts = (node.lower, node.upper, node.step)
                return slice(*(part and value(part) for part in parts))
            case doc.Tuple():
                return tuple(each(node.elts))
            case doc.Call():
                words = {keyword.arg: value(keyword.value) for keyword in node.keywords}
                return value(node.func)(*each(node.args), **words)
            case doc.BinOp():
                return _eval_op(node.op, [value(node.left), value(node.right)])
            case doc.UnaryOp():
                return _eval_op(node.op, [value(node.operand)])
            case doc.Compare(ops=[op]):
                return _eval_op(op, [value(node.left), *map(value, node.comparators)])
            case doc.BoolOp():
                found = value(node.values[0])
                for part in node.values[1:]:
                    if isinstance(found, bool) and found == isinstance(node.op, doc.Or):
                        break
                    found = _eval_op(node.op, [found, value(part)])
                return found
            case _:
                return eval_expr(self, node, values)


_parser: ContextVar[_Parser] = ContextVar("parser")
"""The parser of the script that is read in this thread."""
