"""A finding of the doctor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``status``: ok, absent (and not needed), warning, or problem (not ready)."""

    section: str
    name: str
    status: str
    text: str
