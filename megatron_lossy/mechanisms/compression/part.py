"""Parameters in codes and saved replicas of real ranks."""

from __future__ import annotations

from typing import Any

from ...run.mechanism import Part


class CodedParameters(Part):
    """Ends the gather of the last update before replicas are saved: they are saved as they arrived, in whole."""

    name = "compression"

    def attach(self, run: Any) -> None:
        self._run = run

    def begin_saving(self) -> None:
        self._run.settle()
