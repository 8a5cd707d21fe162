"""Losses of the exchanges: realised loss, survivors of gradients, ages of stale parameters (docs/monitors.md)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from ...base.exchange import Delivery, Stream
from ...config import PHASES, LossyConfig
from .observer import Observer
from .window import Window


class ExchangeMonitor(Observer):
    """Metrics of all exchanges since the last record, over all ranks and streams.

    A rate is absent where nothing was sent, but for phases in which nothing can be lost.
    """

    rates = True

    def __init__(self, config: LossyConfig) -> None:
        self._loses = {phase: config.loses(phase) for phase in PHASES}
        units = ["grad_lost", "grad_sent", "param_lost", "param_sent"]
        reduced = ["reduced", "survivors", "without_survivor"]  # of units that owners reduced
        stale = ["stale", "ages"]  # of units of replicas, after an update
        self._window = Window([*units, *reduced, *stale], largest=["fewest_survivors_negated", "oldest"])
        #: int32[receivers, sources, units] by stream: updates that each unit of each replica has missed in a row.
        self._ages: dict[Stream, np.ndarray] = {}

    def observe(self, delivery: Delivery) -> None:
        if delivery.exchange.phase not in PHASES:
            return
        arrived = delivery.arrived
        sources = list(delivery.sources)
        own = arrived[range(len(arrived)), [sources.index(rank) for rank in delivery.receivers]]
        missed = arrived.size - np.count_nonzero(arrived)
        lost, sent = missed - (own.size - np.count_nonzero(own)), arrived.size - own.size
        if delivery.exchange.phase == "grad":
            count = np.uint8 if len(sources) < 256 else np.uint32
            survivors = np.add.reduce(arrived.view(np.uint8), axis=1, dtype=count)
            self._window.add(
                grad_lost=lost,
                grad_sent=sent,
                reduced=survivors.size,
                survivors=arrived.size - missed,
                without_survivor=survivors.size - np.count_nonzero(survivors),
                fewest_survivors_negated=-int(survivors.min()),
            )
        else:
            ages = self._ages.get(delivery.exchange.stream)
            if ages is None:
                ages = self._ages[delivery.exchange.stream] = np.zeros(arrived.shape, dtype=np.int32)
            ages += 1
            np.multiply(ages, ~arrived, out=ages)
            self._window.add(
                stale=missed, param_lost=lost, param_sent=sent, ages=int(ages.sum()), oldest=int(ages.max())
            )

    def begin_equal(self) -> None:
        self._ages.clear()

    def metrics(self) -> dict[str, float]:
        total = self._window.close()
        result = {
            f"loss rate {phase}": total[f"{phase}_lost"] / max(total[f"{phase}_sent"], 1)
            for phase in PHASES
            if total[f"{phase}_sent"] or not self._loses[phase]
        }
        if total["reduced"]:
            result["survivors mean"] = total["survivors"] / total["reduced"]
            result["survivors min"] = -total["fewest_survivors_negated"]
            result["share without survivor"] = total["without_survivor"] / total["reduced"]
        if total["param_sent"]:
            result["stale age mean"] = total["ages"] / max(total["stale"], 1)
            result["stale age max"] = total["oldest"]
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's ages, and its counts since the last record."""
        ages = [(asdict(stream), torch.from_numpy(ages.copy())) for stream, ages in self._ages.items()]
        return {"ages": ages, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._ages = {Stream(**stream): ages.cpu().numpy().copy() for stream, ages in state["ages"]}
        super().load_state_dict(state)
