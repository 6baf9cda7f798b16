"""A display that acts during a session."""

import io

from dwtir.tune.display import PlainDisplay


class Watcher(PlainDisplay):
    """Does something at some of the trials, by their count."""

    def __init__(self, acts=()):
        super().__init__(io.StringIO())
        self.notes: list[str] = []
        self._acts = dict(acts)
        self._seen = 0

    def trial(self, trial, best, manual):
        super().trial(trial, best, manual)
        self._seen += 1
        self._acts.get(self._seen, lambda: None)()

    def note(self, text):
        self.notes.append(text)
