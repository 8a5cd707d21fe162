"""Observers of a run. They get every exchange once, when its iteration is over, and may look at the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ...base.exchange import Delivery, Stream
from ...base.flags import full_name
from ...config import PHASES


class Replicas(Protocol):
    """The parameters of one stream: this rank's replica, or all replicas of a virtual cluster.

    A place is an offset into the N shards of a bucket.

    ``workers``: N, the number of ranks that shard the buckets. ``owned``: the ranks whose shards this process owns.
    ``units``: the units of loss of the stream. ``shards``: for each bucket the elements of a shard. ``used``: for each
    bucket int64[k, 2], the first and last + 1 places of each run of parameters. The other places are padding.
    """

    stream: Stream
    workers: int
    owned: range
    units: int
    shards: Sequence[int]
    used: Sequence[np.ndarray]

    def own(self, places: Sequence[np.ndarray]) -> np.ndarray:
        """float64[S]: the values in this process. Where it owns a place, the value is the owner's."""

    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        """float64[N, S]: the values of all replicas. This is a collective call."""


#: Looks at the replicas; a collective call at the end of an iteration, when every rank has received the update.
Look = Callable[[], Sequence[Replicas]]


class Observer:
    """Receives the events of a run. Exchanges without loss flags, or that Megatron all-reduced, are not reported."""

    #: Whether its metrics have the loss rates of gradients and parameters.
    rates = False

    def before_update(self, iteration: int, look: Look) -> None:
        """Called before the owners' shards are updated; ``look`` is not collective here."""

    def observe(self, delivery: Delivery) -> None:
        """Called for each exchange of the iteration that just ended. Its ``step`` is that iteration in both phases."""

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        """Called when attempted iteration ``iteration`` (from 0) is over and all its exchanges have been observed.

        ``successful``: it updated the weights. ``look`` finds nothing while no update was made.
        """

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        """Called with other events of the iteration that just ended, before :meth:`finish_iteration`.

        These are errors of :mod:`megatron_lossy.channel.corruption`, and actions of mechanisms on what they lead to.
        """

    def restart(self, iteration: int) -> None:
        """Called when a checkpoint of ``iteration`` attempted iterations was loaded: the next one is ``iteration``."""

    def begin_equal(self) -> None:
        """Called when all replicas have just become equal to the owners' weights."""

    def metrics(self) -> dict[str, float]:
        """Values since the last call, the same on all ranks. A collective call."""
        return {}

    def save(self) -> None:
        """Called while a checkpoint is written: observations so far must be on disk when it is loaded."""

    def close(self) -> None:
        """Called when the run is over."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank that ``--save-replicas`` keeps; empty if there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""


def states_of(observers: Sequence[Observer]) -> dict[str, Any]:
    """Return the states that are not empty, by the observer's package and class."""
    return {_key(full_name(type(one))): state for one in observers if (state := one.state_dict())}


def load_states(observers: Sequence[Observer], states: dict[str, Any]) -> None:
    """Restore :func:`states_of`; observers without a saved state start anew."""
    saved = {_key(name): state for name, state in states.items()}  # they once had the module's name, too
    for one in observers:
        if (key := _key(full_name(type(one)))) in saved:
            one.load_state_dict(saved[key])


def _key(name: str) -> str:
    """Return the package and the class of the full ``name``: a class may move within its package."""
    return f"{name.partition('.')[0]}.{name.rpartition('.')[2]}"


def metrics_of(observers: Sequence[Observer]) -> dict[str, float]:
    """The measurements since the last call; a run without any loses nothing. A collective call."""
    result = {} if any(one.rates for one in observers) else {f"loss rate {phase}": 0.0 for phase in PHASES}
    for one in observers:
        result |= one.metrics()
    return result
