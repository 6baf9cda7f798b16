"""TVM's types for annotations: TVM itself is imported when it is needed."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm import IRModule
    from tvm.runtime import Module
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import LoopRV, SBlockRV
    from tvm.tirx import PrimFunc
    from typing_extensions import Self
else:
    IRModule = LoopRV = Module = PrimFunc = SBlockRV = Schedule = Self = Any

__all__ = ["IRModule", "LoopRV", "Module", "PrimFunc", "SBlockRV", "Schedule", "Self"]
