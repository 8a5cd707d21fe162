"""Metrics of coded exchanges: bytes, and what codes round away (docs/compression.md)."""

from __future__ import annotations

import logging
from typing import Any

from ...base import theory
from ...run.monitor.observer import Look, Observer
from ...run.monitor.window import Window

logger = logging.getLogger(__name__)

#: The share of gradients that codes may round away without a word.
_MUCH = 0.2


class WireMonitor(Observer):
    """Bytes that the ranks of ``run`` send as gradients and parameters, and the rounding of a part of the gradients."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._window = Window(["bytes", "error", "square"])
        self._counted = (0.0, 0.0)
        self._said = False

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        sent = ("grad", "param") if successful else ("grad",)
        for group in self._run.groups:
            self._window.add(bytes=(group.size - 1) * sum(group.wire.shard_bytes[phase] for phase in sent))

    def restart(self, iteration: int) -> None:
        super().restart(iteration)
        self._counted = self._rounded()

    def _rounded(self) -> tuple[float, float]:
        sums = [group.wire.coded["grad"].rounded() for group in self._run.groups if "grad" in group.wire.coded]
        return sum(error for error, _ in sums), sum(square for _, square in sums)

    def metrics(self) -> dict[str, float]:
        now = self._rounded()
        self._window.add(error=now[0] - self._counted[0], square=now[1] - self._counted[1])
        self._counted = now
        total = self._window.close()
        result = {"wire bytes": total["bytes"]}
        if total["square"] > 0:
            result["wire rounding"] = total["error"] / total["square"]
            if result["wire rounding"] > _MUCH and not self._said:
                self._said, wire = True, self._run.config.grad_wire
                logger.warning(
                    "--grad-wire %s: %s rounds away what a loss of %.0f %% would: take int8 or --wire-block 32 (said once)",
                    wire,
                    wire,
                    100 * float(theory.as_loss(result["wire rounding"])),
                )
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of this rank since the last record."""
        now = self._rounded()
        return super().state_dict() | {"rounded": (now[0] - self._counted[0], now[1] - self._counted[1])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        super().load_state_dict(state)
        now, rounded = self._rounded(), state["rounded"]
        self._counted = (now[0] - rounded[0], now[1] - rounded[1])
