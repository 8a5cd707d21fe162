"""What the monitors and the delivery log are told: every exchange once, when its iteration is over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from ..config import PHASES
from ..exchange import Observation


@runtime_checkable
class Resumable(Protocol):
    """An observer with a state of this rank that ``--save-replicas`` keeps."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Recorder(Protocol):
    """An observer that writes files in pieces."""

    def save(self) -> None:
        """A checkpoint is being written: what was observed so far must be on disk when it is loaded."""


def save_records(observers: Sequence[Observer]) -> None:
    """Let recorders write what they have, before a checkpoint."""
    for one in observers:
        if isinstance(one, Recorder):
            one.save()


def states_of(observers: Sequence[Observer]) -> dict[str, Any]:
    """The states of resumable observers by the name of their class."""
    return {type(one).__name__: one.state_dict() for one in observers if isinstance(one, Resumable)}


def load_states(observers: Sequence[Observer], states: dict[str, Any]) -> None:
    """Restore :func:`states_of`; observers that were not there then start anew."""
    for one in observers:
        if isinstance(one, Resumable) and type(one).__name__ in states:
            one.load_state_dict(states[type(one).__name__])


class Observer(Protocol):
    """Is told what happened. Exchanges without loss flags, or that Megatron all-reduced, are not reported."""

    def observe(self, observation: Observation) -> None:
        """An exchange of the iteration that just ended. Its ``step`` is that iteration in both phases."""

    def finish_iteration(self, iteration: int, successful: bool) -> None:
        """Attempted iteration ``iteration`` (from 0) is over, all its exchanges have been observed."""

    def restart(self, iteration: int) -> None:
        """A checkpoint of ``iteration`` attempted iterations was loaded: the next one is ``iteration``."""

    def metrics(self) -> dict[str, float]:
        """Values since the last call, the same on all ranks. A collective call."""

    def close(self) -> None:
        """The run is over."""


def metrics_of(observers: Sequence[Observer]) -> dict[str, float]:
    """What they have measured since the last call; a run without any loses nothing. A collective call."""
    result = {f"loss rate {phase}": 0.0 for phase in PHASES}
    for one in observers:
        result |= one.metrics()
    return result
