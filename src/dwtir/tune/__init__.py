"""Tuning: a search over the strategies' own parameters, measured on the device.

``search`` proposes tiles, ``session`` builds, checks and times them and writes
the best to the database, ``python -m dwtir.tune`` is the command.
"""

from __future__ import annotations

from .session import Outcome, Trial, tune

__all__ = ["Outcome", "Trial", "tune"]
