"""Follows one exchange through the package: which files it passes, and how often the reader has to change files."""

import os
import sys
import threading
from pathlib import Path

import megatron_lossy

MINL = int(os.environ.get("MINL", "0"))
PACKAGE = Path(megatron_lossy.__file__).parent


class Journey:
    """The calls of functions of the package, while it is watched. ``files``: of the calls, in their order."""

    def __init__(self):
        self.files = []

    def __enter__(self):
        self._stack = threading.local()
        sys.setprofile(self._note)
        threading.setprofile_all_threads(self._note) if hasattr(threading, "setprofile_all_threads") else None
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile_all_threads(None) if hasattr(threading, "setprofile_all_threads") else None

    def _note(self, frame, event, _):
        name = frame.f_code.co_filename
        if (
            event == "call"
            and name.startswith(str(PACKAGE))
            and len({line for *_, line in frame.f_code.co_lines() if line}) > MINL
        ):
            self.files.append(str(Path(name).relative_to(PACKAGE)))

    @property
    def passed(self):
        """The files, in the order in which they are first needed."""
        return list(dict.fromkeys(self.files))

    @property
    def changes(self):
        """How often the next line to read is in another file."""
        return sum(a != b for a, b in zip(self.files, self.files[1:]))
