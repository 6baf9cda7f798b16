"""dwtir: depthwise convolution in TensorIR, scheduled by hand and by search."""

from ._version import __version__
from .build import NotTunedWarning, build
from .epilogue import Epilogue
from .errors import (
    ArgumentError,
    CompileError,
    DeviceError,
    DwtirError,
    InvalidEpilogueError,
    InvalidScheduleError,
    InvalidShapeError,
    InvalidTargetError,
    NotTunedError,
    RecordError,
    ToolchainError,
)
from .kernel import Kernel, Timing, load
from .resources import Resources
from .schedules import ARTICLE_STEPS, STRATEGIES, Strategy
from .shape import DepthwiseConv2dShape, Shape
from .target import Target

__all__ = [
    "ARTICLE_STEPS",
    "STRATEGIES",
    "ArgumentError",
    "CompileError",
    "DepthwiseConv2dShape",
    "DeviceError",
    "DwtirError",
    "Epilogue",
    "InvalidEpilogueError",
    "InvalidScheduleError",
    "InvalidShapeError",
    "InvalidTargetError",
    "Kernel",
    "NotTunedError",
    "NotTunedWarning",
    "RecordError",
    "Resources",
    "Shape",
    "Strategy",
    "Target",
    "Timing",
    "ToolchainError",
    "__version__",
    "build",
    "load",
]
