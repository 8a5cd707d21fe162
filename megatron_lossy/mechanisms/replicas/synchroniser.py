"""Sets full replicas to their mean every H updates (PAFT-Sync, PAFT-Dyn), or to a majority if there is one.

PAFT, Algorithms 1 and 2. Before each synchronisation every replica sends its fingerprint and whether it is finite.

1. All are equal: nothing is sent or changed. The mean of three or more equal numbers may differ from that number.
2. More than half are equal and finite: the lowest of them sends its parameters and optimizer state to all, at once.
3. Else all are set to the mean of the finite ones. If some are not finite, they also get the optimizer state of a
   finite one, and all of it happens at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ...base.fetch import PendingArray
from ...base.fingerprint import fingerprint, finite
from ...transport.peers import Peers
from .average import Divergence, Piece, Target, divergence_of, no_divergence, pieces
from .flags import LONGEST, ReplicaFlags
from .repair import Buckets, majority

logger = logging.getLogger(__name__)

Tensors = Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Replica:
    """The tensors of one replica in a stream; functions, since optimizers make their state late. All are contiguous.

    ``parameters``: main parameters. ``moments``: tensors that ``--param-sync-state all`` averages too. ``others``: more
    tensors that a replica needs to go on as another one. ``aside``: forward and backward passes read copies of the
    parameters, so that these can be averaged in place meanwhile.
    """

    parameters: Tensors
    moments: Tensors = list
    others: Tensors = list
    aside: bool = False


@dataclass(frozen=True)
class Copies:
    """The N replicas of one stream. ``replicas``: those of this process, one for each of ``peers.local``.

    ``gradients()``: their reduced gradients.
    """

    name: str
    peers: Peers
    replicas: Sequence[Replica]
    gradients: Callable[[], Buckets] = list

    def parameters(self) -> list[Sequence[torch.Tensor]]:
        """Return the parameters of each local replica."""
        return [replica.parameters() for replica in self.replicas]

    def moments(self) -> list[Sequence[torch.Tensor]]:
        """Return the moments of each local replica."""
        return [replica.moments() for replica in self.replicas]

    def state(self) -> list[Sequence[torch.Tensor]]:
        """Return all tensors of each local replica besides the parameters."""
        return [[*replica.moments(), *replica.others()] for replica in self.replicas]

    def tensors(self) -> list[list[torch.Tensor]]:
        """Return all tensors of each local replica."""
        return [[*parameters, *state] for parameters, state in zip(self.parameters(), self.state(), strict=True)]


@dataclass(frozen=True)
class Synchronisation:
    """A synchronisation that has arrived.

    ``kinds``: for each stream "equal", "majority", "mean", "first", or "nothing" if no replica was finite. ``updates``:
    their number before it. ``interval``: updates until the next. ``divergence``: r, the root mean square distance of
    replicas from their mean before it, relative to the length of the mean. ``not_finite``: replicas that were not
    finite, over the streams of this process.
    """

    kinds: dict[str, str]
    updates: int
    interval: int
    divergence: float
    not_finite: int

    def rows(self) -> list[dict[str, Any]]:
        """Return rows for the log of events: one for each stream."""
        row = {"kind": "sync", "interval": self.interval, "divergence": self.divergence}
        return [{**row, "stream": stream, "action": kind} for stream, kind in self.kinds.items()]


@dataclass
class _Part:
    """The exchange of one stream under way: ``pieces`` of parameters, then of ``moments``, to wait for and write."""

    kind: str
    target: Target | None
    parameters: list[Piece] = field(default_factory=list)
    moments: list[Piece] = field(default_factory=list)
    divergence: Divergence = no_divergence
    not_finite: int = 0

    @property
    def changed(self) -> bool:
        """Whether parameters were set to something else already, so that none are on the way."""
        return self.target is not None and not self.parameters


@dataclass
class _Flight:
    updates: int
    parts: list[_Part]


class Synchroniser:
    """Keeps the replicas of some streams together. All verbs are collective calls of the whole world.

    ``total``: adds up float64[k] over all processes of the world, so that pipeline stages and tensor-parallel ranks
    decide alike.
    """

    def __init__(
        self, config: ReplicaFlags, streams: Sequence[Copies], total: Callable[[np.ndarray], np.ndarray]
    ) -> None:
        self._config = config
        self._streams = [stream for stream in streams if stream.peers.size > 1]
        self._total = total
        self._since = 0
        self._flight: _Flight | None = None
        self._happened: list[Synchronisation] = []
        self._warned = False
        self.interval = Interval(config)

    # --- verbs -----------------------------------------------------------------------------------------------------

    @property
    def wants_gradient(self) -> bool:
        """Whether the next verb that synchronises needs the length of this iteration's local gradients."""
        due = self._flight is not None if self._config.param_sync_overlap else self._since + 1 >= self.interval.current
        return self._config.synchronises and self.interval.needs_gradient and due

    @property
    def under_way(self) -> bool:
        """Whether a synchronisation is under way; all processes agree."""
        return self._flight is not None

    @property
    def moves(self) -> bool:
        """Whether parameters of this process are on the way.

        Main parameters may then be sums, and the model has the earlier values.
        """
        return self._flight is not None and any(part.parameters for part in self._flight.parts)

    def finished(self, gradient: Sequence[Sequence[float]] | None = None) -> list[str]:
        """Call this after a successful update. Launches a synchronisation if it is due; without overlap ends it.

        ``gradient``: if it is wanted, |g|^2 of the local gradient before its reduction, for each stream and local
        replica. Return the streams whose parameters may have changed, so that their copies must be renewed. Streams
        under way are not among them: parameters that are averaged in place hold sums.
        """
        self._since += 1
        if not self._config.synchronises or self._since < self.interval.current:
            return []
        assert self._flight is None
        flight = _Flight(self._since, [self._launch_stream(stream) for stream in self._streams])
        self._since = 0
        changed = [stream.name for stream, part in zip(self._streams, flight.parts, strict=True) if part.changed]
        if self._config.param_sync_overlap:
            self._flight = flight
        else:
            self._end(flight, gradient)
        return changed

    def arrive(self, gradient: Sequence[Sequence[float]] | None = None) -> None:
        """End the synchronisation under way. Call this before the next update, which renews all copies.

        ``gradient``: see :meth:`finished`.
        """
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._end(flight, gradient)

    def take(self) -> list[Synchronisation]:
        """Return the synchronisations that arrived since the last call."""
        happened, self._happened = self._happened, []
        return happened

    # --- their work ------------------------------------------------------------------------------------------------

    def _launch_stream(self, stream: Copies) -> _Part:
        peers = stream.peers
        fingerprints, whole = self._fingerprints_of(stream)
        target = self._target(fingerprints, whole)
        lost = int((~whole).sum())
        if target is None:
            kind = "equal" if whole.all() else "nothing"
            if kind == "nothing" and not self._warned:
                self._warned = True
                logger.warning("no replica of %s is finite: none is averaged (said once)", stream.name)
            # Equal replicas have a length too: a stream that has not drifted lowers r over all streams.
            length = self._length(stream) if kind == "equal" else no_divergence
            return _Part(kind, None, divergence=length, not_finite=lost)
        # A replica that is not finite would spoil the gradients of all others before the next update.
        overlaps = self._config.param_sync_overlap and target.kind != "majority" and not lost
        part = _Part(target.kind, target, not_finite=lost)
        in_place = overlaps and all(replica.aside for replica in stream.replicas)
        part.parameters, norms = self._exchange(peers, target, pieces(stream.parameters(), in_place), overlaps)
        part.divergence = divergence_of(target, norms)
        if target.kind == "majority":
            self._exchange(peers, target, pieces(stream.state()), False)
            return part
        if self._config.averages_moments:
            part.moments, _ = self._exchange(peers, target, pieces(stream.moments(), overlaps), overlaps)
        if lost:
            first = int(np.flatnonzero(whole)[0])
            state = [replica.others() for replica in stream.replicas]
            if not self._config.averages_moments:
                state = stream.state()
            self._exchange(peers, Target("first", whole, ~whole, first), pieces(state), False)
        return part

    def _fingerprints_of(self, stream: Copies) -> tuple[np.ndarray, np.ndarray]:
        """Return uint64[N] and bool[N]: the fingerprint of each replica, and whether everything in it is finite."""
        rows = []
        for replica in stream.replicas:
            parameters, moments = list(replica.parameters()), list(replica.moments())
            compared = parameters + moments if self._config.averages_moments else parameters
            device = parameters[0].device
            # Moments that are not finite would spoil the parameters of a replica again with its next update.
            rows.append(torch.stack([fingerprint(compared, device), finite(parameters + moments, device).long()]))
        gathered = stream.peers.gather(torch.stack(rows))
        return gathered[:, 0], gathered[:, 1].astype(bool)

    def _target(self, fingerprints: np.ndarray, whole: np.ndarray) -> Target | None:
        if not whole.any():
            return None
        everyone = np.ones(len(whole), dtype=bool)
        if not self._config.averages_always:
            if (fingerprints == fingerprints[0]).all() and whole.all():
                return None
            right = majority(fingerprints, whole)
            if right is not None:
                return Target("majority", whole, everyone, right)
        if self._config.copies_first:
            return Target("first", whole, everyone, int(np.flatnonzero(whole)[0]))
        return Target("mean", whole, everyone)

    @staticmethod
    def _exchange(peers: Peers, target: Target, parts: Any, overlaps: bool) -> tuple[list[Piece], list[Any]]:
        """Launch pieces; without overlap end each at once. Return pieces under way, and norms of ended ones."""
        launched, norms = [], []
        for piece in parts:
            piece.launch(peers, target)
            if overlaps:
                launched.append(piece)
                continue
            piece.wait()
            norms.append(piece.differences(peers, target))
            piece.write(peers, target)
        return launched, norms

    @staticmethod
    def _length(stream: Copies) -> Divergence:
        squares = [torch.linalg.vector_norm(tensor.detach()).double() ** 2 for tensor in stream.parameters()[0]]
        local = len(stream.replicas) / stream.peers.size
        square = PendingArray(torch.stack(squares).sum())

        def known() -> tuple[float, float]:
            return 0.0, local * float(square.wait())

        return known

    def _end(self, flight: _Flight, gradient: Sequence[Sequence[float]] | None) -> None:
        for stream, part in zip(self._streams, flight.parts, strict=True):
            if part.target is None:
                continue
            for piece in part.parameters + part.moments:
                piece.wait()
            if part.parameters:
                norms = [piece.differences(stream.peers, part.target) for piece in part.parameters]
                part.divergence = divergence_of(part.target, norms)
            for piece in part.parameters + part.moments:
                piece.write(stream.peers, part.target)
        self._decide(flight, gradient)

    def _decide(self, flight: _Flight, gradient: Sequence[Sequence[float]] | None) -> None:
        divergences = [part.divergence() for part in flight.parts]
        apart, mean = sum(apart for apart, _ in divergences), sum(mean for _, mean in divergences)
        local = 0.0
        if self.interval.needs_gradient:
            assert gradient is not None, "the length of the local gradients was wanted"
            for stream, squares in zip(self._streams, gradient, strict=True):
                local += sum(squares) / stream.peers.size
        apart, mean, local = self._total(np.array([apart, mean, local])).tolist()
        self.interval.arrived(flight.updates, apart, mean, local)
        kinds = {stream.name: part.kind for stream, part in zip(self._streams, flight.parts, strict=True)}
        not_finite = sum(part.not_finite for part in flight.parts)
        r = relative(apart, mean)
        self._happened.append(Synchronisation(kinds, flight.updates, self.interval.current, r, not_finite))

    # --- saved state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must be saved for a run to continue bit for bit.

        Call it before saving parameters: it ends exchanges. Pieces averaged in place are the parameters, or moments,
        themselves.
        """
        state: dict[str, Any] = {"interval": {"current": self.interval.current}, "since": self._since, "flight": None}
        if self._flight is not None:
            parts = [_saved(part) for part in self._flight.parts]
            state["flight"] = {"updates": self._flight.updates, "parts": parts}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`, after the parameters and the optimizer's state."""
        self.interval.current = state["interval"]["current"]
        self._since, self._flight = state["since"], None
        if state["flight"] is not None:
            saved = zip(self._streams, state["flight"]["parts"], strict=True)
            parts = [self._restored(stream, part) for stream, part in saved]
            self._flight = _Flight(state["flight"]["updates"], parts)

    def restart(self) -> None:
        """Begin again with replicas that are all equal: a checkpoint without their state was loaded."""
        self._since, self._flight = 0, None
        self.interval = Interval(self._config)
        self._happened.clear()

    def _restored(self, stream: Copies, saved: dict[str, Any]) -> _Part:
        apart, mean = saved["divergence"]
        part = _Part(saved["kind"], None, divergence=lambda: (apart, mean), not_finite=saved["not_finite"])
        if saved["chosen"] is not None:
            chosen = saved["chosen"].numpy()
            part.target = Target(saved["kind"], chosen, np.ones(len(chosen), dtype=bool), saved["source"])
        if saved["parameters"]:
            in_place = all(replica.aside for replica in stream.replicas)
            part.parameters = list(pieces(stream.parameters(), in_place))
        if saved["moments"]:
            part.moments = list(pieces(stream.moments(), True))
        for made, of in ((part.parameters, saved["parameters"]), (part.moments, saved["moments"])):
            for piece, held in zip(made, of, strict=True):
                piece.load_state_dict(held)
        return part


def _saved(part: _Part) -> dict[str, Any]:
    return {
        "kind": part.kind,
        "chosen": None if part.target is None else torch.from_numpy(part.target.chosen),
        "source": None if part.target is None else part.target.source,
        "divergence": part.divergence(),
        "not_finite": part.not_finite,
        "parameters": [piece.state_dict() for piece in part.parameters],
        "moments": [piece.state_dict() for piece in part.moments],
    }


# --- the number of updates until replicas are averaged next ----------------------------------------------------------
# PAFT, Algorithm 2, line 11 (``snr``), and a rule of ours (``divergence``). Divergence grows with the updates k since the
# last synchronisation as k^a: a = 1/2 for SGD and Adam, up to 3/2 with momentum. The rule H <- k tau / r with r ~ k^a is
# a map of slope 1 - a in logarithms, between -1/2 and 1/2: it settles. The slope of ``snr``, H ~ 1/r, is -a: a cycle from
# a = 1 on.

#: The ``divergence`` rule changes an interval at most by this factor at a time.
STEP = 4


class Interval:
    """The interval H, and the rule that changes it. ``current``: H now."""

    def __init__(self, config: ReplicaFlags) -> None:
        self._config = config
        self.current = config.param_sync_interval

    @property
    def needs_gradient(self) -> bool:
        """Whether the rule needs the length of local gradients."""
        return self._config.sync_rule[0] == "snr"

    def arrived(self, updates: int, divergence: float, mean: float, gradient: float | None) -> None:
        """Adapt H after a synchronisation that followed ``updates``.

        All other arguments are sums of squares over all parameters. ``divergence``: |mean - replica|^2 before it, the
        mean over replicas. ``mean``: of the mean replica. ``gradient``: of local gradients before their reduction, the
        mean over replicas.
        """
        if self._config.sync_rule[0] == "snr":
            assert gradient is not None
            self.current = self._within(snr(gradient, divergence))
        elif self._config.sync_rule[0] == "divergence":
            r = relative(divergence, mean)
            self.current = self._within(proportional(updates, r, self._config.sync_rule[1]))

    def _within(self, interval: float) -> int:
        return round(min(max(interval, 1), LONGEST))


def relative(divergence: float, mean: float) -> float:
    """Return r: the distance of replicas from their mean, relative to its length. Both arguments are squared sums."""
    if divergence == 0:
        return 0.0
    r = math.sqrt(divergence / mean) if mean else math.inf
    return math.inf if math.isnan(r) else r


def snr(gradient: float, divergence: float) -> float:
    """Return the ratio of root mean squares; infinite for equal replicas. Arguments are sums of squares."""
    if divergence == 0:
        return math.inf
    ratio = gradient / divergence
    return 0.0 if math.isnan(ratio) else math.sqrt(ratio)


def proportional(updates: int, r: float, tolerance: float) -> float:
    """Return the interval for r = ``tolerance`` under proportional growth, within :data:`STEP` times ``updates``."""
    wanted = STEP * updates if r == 0 else updates * tolerance / r
    return min(max(wanted, math.ceil(updates / STEP)), STEP * updates)
