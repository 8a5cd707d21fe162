"""Writing whole files: aside, then renamed, so that no reader finds half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, then rename it: ``path`` is never half written."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        aside = Path(folder) / path.name
        write(aside)
        os.replace(aside, path)
