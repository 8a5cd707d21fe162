"""The full replicas that a process holds: that of a real rank, or those of all virtual workers (docs/corruption.md).

Every replica has all of the optimizer. Gradients are all-reduced; errors may hit what each replica receives. Only
:class:`.FullReplicas` exchanges parameters.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from ...base.exchange import Exchange
from ...base.fetch import PendingArray
from ...channel.corruption.applied import Errors, scaled_unit
from ...hooks.buckets import errors_in
from ...run.mechanism import Part
from ...run.monitor.window import of_all_ranks
from ...transport.peers import Peers
from .full_replicas import FullReplicas
from .repair import Buckets
from .streams import Main, Mains, ReplicaStream, main_parameters, moments_of, renew
from .synchroniser import Copies, Replica, Tensors


class HeldReplicas(Part, ABC):
    """The full replicas of this process, one for each of the local ``peers`` of a stream.

    A replica is given by its number among those of this process.
    """

    name = "replicas"

    def __init__(self) -> None:
        #: The streams of all model chunks, and the peers of each.
        self.streams: list[ReplicaStream] = []
        self.peers: list[Peers] = []
        self._errors: list[list[Errors]] = []  # by stream and replica
        self._squares: dict[tuple[int, int, int], Any] = {}  # by stream, replica and bucket: |g|^2 of local gradients
        self._together: FullReplicas | None = None

    def attach(self, run: Any) -> None:
        self._run, self._corruption = run, run.corruption
        run.keeper = self
        run.sources.append(self.happened)
        run.events.on(update_begins=self.begin_update, restart=self.restart)

    def add(self, streams: Sequence[ReplicaStream]) -> None:
        """Register ``streams``."""
        if not self.streams:
            self._run.after_update.append(lambda _: self.finished())
        for stream in streams:
            peers = self.peers_of(stream)
            ranks = peers.local if self._run.config.grad_error_at == "broadcast" else [0] * len(peers.local)
            self.streams.append(stream)
            self.peers.append(peers)
            self._errors.append([self.errors_of(stream, rank) for rank in ranks])

    def errors_of(self, stream: ReplicaStream, rank: int) -> Errors:
        """Return the errors in the gradients that ``rank`` receives of ``stream``."""
        return errors_in(self._corruption, stream.stream, stream.buckets, stream.ranges, rank)

    # --- differences of real and virtual runs; by default those of the one replica of a real rank -----------------

    @property
    def there(self) -> bool:
        """Whether there are replicas that may differ."""
        return bool(self.streams)

    @abstractmethod
    def peers_of(self, stream: ReplicaStream) -> Peers:
        """Return all replicas of ``stream``."""

    def turn(self, replica: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model and its optimizer have the state of ``replica``."""
        return contextlib.nullcontext()

    @abstractmethod
    def gradients(self, stream: int) -> Buckets:
        """Return the tensors that the optimizer reads."""

    def weights(self, replica: int, own: Sequence[Main]) -> list[torch.Tensor]:
        """Return the values of the float32 weights ``own``."""
        return [main.data for main, _ in own]

    def states(self, replica: int, own: Sequence[Main]) -> list[dict[str, Any]]:
        """Return the state, in torch's optimizers, of each of the float32 weights ``own``."""
        return [inner.state.get(main, {}) for main, inner in own]  # loading replaces them

    def models(self, mains: Mains) -> Sequence[Tensors]:
        """Return the weights of each replica's model that are copies of float32 weights."""
        return []

    # --- these replicas and their peers ----------------------------------------------------------------------------

    @property
    def together(self) -> FullReplicas | None:
        """The replicas here and their peers, once the optimizer exists; ``None`` if there are none that may differ."""
        if self._together is None and self.there:
            mains = main_parameters(self._run.living_optimizers())
            copies = []
            for number, (stream, peers) in enumerate(zip(self.streams, self.peers, strict=True)):
                replicas = [self._replica(replica, stream, mains) for replica in range(len(peers.local))]
                copies.append(Copies(stream.stream.name, peers, replicas, partial(self.gradients, number)))
            config, renews = self._run.config, partial(self._renew, mains)
            self._together = FullReplicas(
                config, copies, lambda values: of_all_ranks(values).sum(axis=0), renews, self.models(mains)
            )
        return self._together

    def _replica(self, replica: int, stream: ReplicaStream, mains: Mains) -> Replica:
        known = [parameter for parameter in stream.parameters if parameter in mains]
        own = [mains[parameter] for parameter in known]

        def state(which: int) -> list[torch.Tensor]:
            return moments_of(self.weights(replica, own), self.states(replica, own))[which]

        return Replica(
            parameters=partial(self.weights, replica, own),
            moments=partial(state, 0),
            others=partial(state, 1),
            aside=all(main is not parameter for parameter, (main, _) in zip(known, own, strict=True)),
        )

    def _renew(self, mains: Mains, names: Collection[str]) -> None:
        for replica in range(len(self.peers[0].local)):
            with self.turn(replica):
                renew(self.streams, names, mains)

    # --- an iteration ----------------------------------------------------------------------------------------------

    @property
    def wants_gradient(self) -> bool:
        """Whether the lengths of local gradients, before their reduction, are needed; see :meth:`note`."""
        return self._together is not None and self._together.synchroniser.wants_gradient

    def note(self, stream: int, replica: int, bucket: int, square: Any) -> None:
        """Note the ``square`` of the length of a local gradient of this iteration, a number or a tensor of one."""
        self._squares[stream, replica, bucket] = PendingArray(square) if isinstance(square, torch.Tensor) else square

    def hit(self, stream: int, replica: int, bucket: int, buffer: torch.Tensor) -> None:
        """Let errors hit ``buffer``, the gradient that ``replica`` received."""
        if self.peers[stream].size > 1:  # else nothing is sent
            exchange = Exchange("grad", self.streams[stream].stream, self._run.iteration)
            self._errors[stream][replica].hit(exchange, bucket, buffer, self.unit)

    def unit(self) -> float | torch.Tensor:
        """Return the factor of the gradients. One on a device stays there: reading it would wait."""
        scale = self._run.loss_scale()
        return 1.0 if scale is None else scaled_unit(1.0, scale)

    def begin_iteration(self) -> None:
        """Compare the gradients of replicas."""
        if self.together is not None:
            self.together.check()

    def begin_update(self) -> None:
        """Let a mean under way arrive."""
        if self.together is not None:
            self.together.synchroniser.arrive(self._gradient(self.together))

    def finished(self) -> None:
        """Note that the update has been made."""
        if self.together is not None:
            self.together.finished(self._gradient(self.together))
        self._squares.clear()

    def _gradient(self, together: FullReplicas) -> list[list[float]] | None:
        if not together.synchroniser.wants_gradient:
            return None
        sums = [[0.0] * len(peers.local) for peers in self.peers]
        for (stream, replica, _), square in self._squares.items():
            sums[stream][replica] += float(square.wait() if isinstance(square, PendingArray) else square)
        return [own for own, peers in zip(sums, self.peers, strict=True) if peers.size > 1]

    def happened(self, iteration: int) -> list[Any]:
        """Return the events of ``iteration``: :class:`Reduction`, :class:`Mismatch`, :class:`Synchronisation`."""
        everywhere = self._run.config.grad_error_at == "reduce"  # all have the same, and the first one reports it
        reductions = [
            reduction
            for errors, peers in zip(self._errors, self.peers, strict=True)
            for number, own in zip(peers.local, errors, strict=True)
            for reduction in own.take(iteration)
            if not everywhere or number == 0
        ]
        return [*reductions, *([] if self.together is None else self.together.take())]

    # --- weights and saved state -----------------------------------------------------------------------------------

    def owner_weights(self) -> contextlib.AbstractContextManager[None] | None:
        """Return a context with the mean of the finite replicas in the model; ``None`` while all are equal."""
        return None if self.together is None else self.together.averaged()

    def replica_state(self) -> Any:
        """Return the whole state of the replicas of this process; ``None`` while they are equal."""
        return None if self.together is None else self.together.state_dict()

    def load_replica_state(self, state: Any) -> None:
        """Restore :meth:`replica_state`."""
        assert self.together is not None
        self.together.load_state_dict(state)

    def restart(self, iteration: int) -> None:
        """Begin again with replicas that are all equal."""
        if self.together is not None:
            self.together.restart()
