"""Metrics of errors in gradients and of replicas that differ (docs/corruption.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...channel.corruption.applied import Reduction
from ...run.monitor import Look, Observer
from ...run.monitor.window import Window
from .full_replicas import FullReplicas, Mismatch
from .synchroniser import Synchronisation


class ReplicaMonitor(Observer):
    """Metrics of full replicas. ``interval``: iterations between looks.

    ``replicas()``: the full replicas, or ``None`` with the distributed optimizer.
    """

    def __init__(self, replicas: Callable[[], FullReplicas | None], interval: int) -> None:
        self._replicas = replicas
        self._interval = interval
        self._window = Window(["hits", "squares", "noisy", "flips", "mismatches", "majority", "mean"], ["not finite"])
        self._syncs = 0
        self._divergence: float | None = None

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        for event in what:
            if isinstance(event, Reduction):
                for error in (hit.event for hit in event.hits):
                    noisy, flips = error.kind == "gaussian", len(error.bits)
                    self._window.add(hits=1, squares=error.std**2, noisy=noisy, flips=flips)
            elif isinstance(event, Mismatch):
                self._window.add(mismatches=1)
                if event.repaired:
                    self._window.add(**{event.repaired: 1})
            elif isinstance(event, Synchronisation):
                self._syncs += any(kind in ("majority", "mean", "first") for kind in event.kinds.values())
                self._window.add(**{"not finite": event.not_finite})
                self._divergence = event.divergence

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        replicas = self._replicas()
        if replicas is not None and self._interval and (iteration + 1) % self._interval == 0:
            seen = replicas.divergence()
            self._divergence = self._divergence if seen is None else seen

    def restart(self, iteration: int) -> None:
        super().restart(iteration)
        self._syncs, self._divergence = 0, None

    def metrics(self) -> dict[str, float]:
        total, replicas = self._window.close(), self._replicas()
        result = {"gradient errors": total["hits"]}
        if total["noisy"]:
            result["error rms"] = (total["squares"] / total["noisy"]) ** 0.5
        if total["flips"]:
            result["flipped bits"] = total["flips"]
        if replicas is None:
            return result
        if replicas.checks:
            result["gradient mismatches"] = total["mismatches"]
            result["gradient repairs by majority"] = total["majority"]
            result["gradient repairs by mean"] = total["mean"]
        if replicas.interval:
            result |= {"param syncs": float(self._syncs), "param sync interval": float(replicas.interval)}
            result["replicas not finite"] = max(total["not finite"], 0.0)
            self._syncs = 0
        if self._divergence is not None:
            result["replica divergence"] = self._divergence
        return result

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"syncs": self._syncs, "divergence": self._divergence}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._syncs, self._divergence = state["syncs"], state["divergence"]
