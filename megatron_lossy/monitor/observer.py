"""What watches a run: told every exchange once, when its iteration is over, and where the weights are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ..config import PHASES
from ..exchange import Delivery, Stream
from ..pipeline import Fate, Message


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


#: Looks at the replicas; a collective call at the end of an iteration, when every rank has what it gets of the update.
Look = Callable[[], Sequence[Replicas]]


class Observer:
    """Is told what happens in a run. Exchanges without loss flags, or that Megatron all-reduced, are not reported."""

    def before_update(self, iteration: int, look: Look) -> None:
        """The owners' shards are about to be updated; ``look`` is not collective here."""

    def observe(self, delivery: Delivery) -> None:
        """An exchange of the iteration that just ended. Its ``step`` is that iteration in both phases."""

    def crossed(self, message: Message, fate: Fate) -> None:
        """A message between pipeline stages arrived where it could lose something, and this became of it. At once."""

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        """Attempted iteration ``iteration`` (from 0) is over, all its exchanges have been observed.

        ``successful``: it updated the weights. ``look`` finds nothing while no update was made.
        """

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        """What else happened in the iteration that just ended: errors of :mod:`megatron_lossy.channel.corruption`, and what
        :mod:`megatron_lossy.sync` did about replicas that differ. Before :meth:`finish_iteration`."""

    def restart(self, iteration: int) -> None:
        """A checkpoint of ``iteration`` attempted iterations was loaded: the next one is ``iteration``."""

    def metrics(self) -> dict[str, float]:
        """Values since the last call, the same on all ranks. A collective call."""
        return {}

    def save(self) -> None:
        """A checkpoint is being written: what was observed so far must be on disk when it is loaded."""

    def close(self) -> None:
        """The run is over."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank that ``--save-replicas`` keeps; empty if there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""


def states_of(observers: Sequence[Observer]) -> dict[str, Any]:
    """The states that are not empty, by the name of the observer's class."""
    return {type(one).__name__: state for one in observers if (state := one.state_dict())}


def load_states(observers: Sequence[Observer], states: dict[str, Any]) -> None:
    """Restore :func:`states_of`; observers that were not there then start anew."""
    for one in observers:
        if type(one).__name__ in states:
            one.load_state_dict(states[type(one).__name__])


def metrics_of(observers: Sequence[Observer]) -> dict[str, float]:
    """What they have measured since the last call; a run without any loses nothing. A collective call."""
    result = {f"loss rate {phase}": 0.0 for phase in PHASES}
    for one in observers:
        result |= one.metrics()
    return result
