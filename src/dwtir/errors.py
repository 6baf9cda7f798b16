"""The exceptions that dwtir raises on purpose.

Every class also derives from the builtin that a caller would already catch,
so ``except ValueError`` goes on working for somebody who never heard of dwtir.
A message says what was wrong, what was given, and what is allowed.
"""


class DwtirError(Exception):
    """Base class of all errors raised by dwtir."""


class InvalidShapeError(DwtirError, ValueError):
    """The described convolution does not exist or cannot be indexed."""


class InvalidEpilogueError(DwtirError, ValueError):
    """An epilogue names an unknown step or repeats one that takes a tensor."""


class InvalidScheduleError(DwtirError, ValueError):
    """The schedule is unknown, or its tile does not fit the shape or the device."""


class InvalidTargetError(DwtirError, ValueError):
    """The target is unknown or lacks a limit that is needed."""


class ArgumentError(DwtirError, ValueError, TypeError):
    """A tensor passed to a kernel has the wrong shape, dtype, device or memory."""


class NotTunedError(DwtirError, LookupError):
    """No tuning record exists for this shape on this device."""


class RecordError(DwtirError, ValueError):
    """A tuning record or a saved kernel is damaged, foreign or hostile."""


class ToolchainError(DwtirError, RuntimeError):
    """A library, header or compiler that is needed is missing; the message says how to get it."""


class DeviceError(DwtirError, RuntimeError):
    """The device failed while it ran a kernel, or the process that used it died."""


class CompileError(DwtirError, RuntimeError):
    """A backend compiler rejected generated code. This is a bug in dwtir."""
