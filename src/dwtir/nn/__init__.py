"""PyTorch: depthwise convolution as an operator, a function, a module, and a network's layers."""

from ..errors import ToolchainError

try:
    import torch  # noqa: F401  # everything below needs it
except ImportError as error:
    raise ToolchainError("dwtir.nn needs torch: pip install 'dwtir[torch]'") from error

from . import functional
from .convert import ConvertedLayer, Report, convert, replace, restore
from .converted import OriginalPathWarning
from .module import DepthwiseConv2d

__all__ = [
    "ConvertedLayer",
    "DepthwiseConv2d",
    "OriginalPathWarning",
    "Report",
    "convert",
    "functional",
    "replace",
    "restore",
]
