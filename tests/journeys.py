"""Follows an exchange through the package: which files it passes, and how often whoever reads along changes files."""

import itertools
import sys
from pathlib import Path

import megatron_lossy

PACKAGE = str(Path(megatron_lossy.__file__).parent)


class Journey:
    """Within its context the calls of functions of the package are noted, on this thread. ``files``: theirs, in order."""

    def __init__(self):
        self.files = []

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            self.files.append(name.removeprefix(PACKAGE + "/"))

    def wrap(self, function):
        """``function``, whose first call is noted and no other."""

        def noted(*args, **kwargs):
            if self.files:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return noted

    @property
    def passed(self):
        """The files, in the order in which they are first needed."""
        return list(dict.fromkeys(self.files))

    @property
    def changes(self):
        """How often the next function is in another file."""
        return sum(one != other for one, other in itertools.pairwise(self.files))
