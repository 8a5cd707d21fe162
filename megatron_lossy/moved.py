"""Commands that have another name now: the old one still works, and names the new one in a line."""

from __future__ import annotations

import os
import runpy
import sys


def run_as(module: str, old: str, new: str) -> None:
    """Run ``module`` with the arguments of this process, as ``python -m`` would. ``old``, ``new``: the commands."""
    if os.environ.get("RANK", "0") == "0":
        print(f"python -m {old} is python -m {new} now", file=sys.stderr, flush=True)
    # By name: what has moved has moved up, and nothing here may depend on it.
    runpy.run_module(module, run_name="__main__", alter_sys=True)
