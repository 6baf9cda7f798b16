"""Tuning: a search over the strategies' own parameters, measured on the devices.

``search`` and ``evolutionary`` propose strategies, a ``session`` hands them to a
``fleet`` of ``devices``, whose ``worker`` processes build, check and time them on a
``testbed``, and writes the best to the database. ``python -m dwtir.tune`` is the command.
"""

from .outcome import Outcome, Task, Trial
from .run import tune
from .session import Settings

__all__ = ["Outcome", "Settings", "Task", "Trial", "tune"]
