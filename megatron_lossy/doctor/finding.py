"""What the doctor finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. ``status``: ok, absent (and not needed), warning, or problem (not ready)."""

    section: str
    name: str
    status: str
    text: str
