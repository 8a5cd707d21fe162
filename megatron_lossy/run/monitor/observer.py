"""Observers of a run. They get every exchange once, at the end of its iteration, and may look at the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ...base.exchange import Delivery, Stream
from ...base.flags import full_name
from ...config import PHASES
from ...recovery.rows import to_device
from .window import Window


class Replicas(ABC):
    """The parameters of one stream: this rank's replica, or all replicas of a virtual cluster.

    A place is an offset into the N shards of a bucket.

    ``workers``: N, the number of ranks that shard the buckets. ``owned``: the ranks whose shards this process owns.
    ``units``: the units of loss of the stream. ``shards``: for each bucket the elements of a shard. ``weights``: of each
    bucket, the owner's where this process owns a place. ``used()``: for each bucket int64[k, 2], the first and last + 1 places of
    each run of parameters. The other places are padding.
    """

    def __init__(
        self,
        stream: Stream,
        workers: int,
        owned: range,
        units: int,
        shards: Sequence[int],
        weights: Sequence[torch.Tensor],
        used: Callable[[], Sequence[np.ndarray]],
    ) -> None:
        self.stream = stream
        self.workers = workers
        self.owned = owned
        self.units = units
        self.shards = shards
        self._weights = weights
        self.used = used

    def own(self, places: Sequence[np.ndarray]) -> np.ndarray:
        """Return float64[S]: the values in this process. Where it owns a place, the value is the owner's."""
        return self._values(places).double().cpu().numpy()

    def _values(self, places: Sequence[np.ndarray]) -> torch.Tensor:
        """Return float32[S], which holds every parameter dtype exactly."""
        found = zip(self._weights, places, strict=True)
        return torch.cat([weights[to_device(chosen, weights.device)].float() for weights, chosen in found])

    @abstractmethod
    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        """Return float64[N, S]: the values of all replicas. This is a collective call."""


#: Looks at the replicas; a collective call at the end of an iteration, when every rank has received the update.
Look = Callable[[], Sequence[Replicas]]


class Observer:
    """Receives the events of a run. Exchanges without loss flags, or that Megatron all-reduced, are not reported."""

    #: Whether its metrics have the loss rates of gradients and parameters.
    rates = False
    #: The counts of this rank since the last record, if it has such.
    _window: Window | None = None

    def before_update(self, iteration: int, look: Look) -> None:
        """Prepare for an update of the owners' shards; ``look`` is not collective here."""

    def observe(self, delivery: Delivery) -> None:
        """Record an exchange of the iteration that just ended. Its ``step`` is that iteration in both phases."""

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        """End attempted iteration ``iteration`` (from 0), all of whose exchanges have been observed.

        ``successful``: it updated the weights. ``look`` finds nothing while no update was made.
        """

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        """Record other events of an iteration, before its :meth:`finish_iteration`.

        These are errors of :mod:`megatron_lossy.channel.corruption`, and events of mechanisms, with a verb ``rows`` for the
        log. An event may come as soon as it happens, while the iteration before is not finished.
        """

    def restart(self, iteration: int) -> None:
        """Go on at ``iteration``, after a checkpoint of so many attempted iterations was loaded."""
        if self._window is not None:
            self._window.clear()

    def begin_equal(self) -> None:
        """Begin with all replicas equal to the owners' weights."""

    def metrics(self) -> dict[str, float]:
        """Return values since the last call, the same on all ranks. A collective call."""
        return {}

    def save(self) -> None:
        """Write observations so far to disk, while a checkpoint is written that needs them."""

    def close(self) -> None:
        """Close at the end of the run."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank that ``--save-replicas`` keeps; empty if there is none."""
        return {} if self._window is None else {"window": self._window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        if self._window is not None:
            self._window.load_state_dict(state["window"])


def states_of(observers: Sequence[Observer]) -> dict[str, Any]:
    """Return the states that are not empty, by the observer's package and class."""
    return {_key(full_name(type(observer))): state for observer in observers if (state := observer.state_dict())}


def load_states(observers: Sequence[Observer], states: dict[str, Any]) -> None:
    """Restore :func:`states_of`; observers without a saved state start anew."""
    for observer in observers:
        if (key := _key(full_name(type(observer)))) in states:
            observer.load_state_dict(states[key])


def _key(name: str) -> str:
    """Return the package and the class of the full ``name``: a class may move within its package."""
    return f"{name.partition('.')[0]}.{name.rpartition('.')[2]}"


def metrics_of(observers: Sequence[Observer]) -> dict[str, float]:
    """Return the measurements since the last call; a run without any loses nothing. A collective call."""
    result = {} if any(observer.rates for observer in observers) else {f"loss rate {phase}": 0.0 for phase in PHASES}
    for observer in observers:
        result |= observer.metrics()
    return result
