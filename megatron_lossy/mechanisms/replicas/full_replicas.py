"""Check, repair and synchronisation of full replicas, between the reduction of gradients and the next update.

An iteration (docs/corruption.md) reduces gradients, in which errors may happen. When the optimizer's step begins, the
gradients are compared and repaired, and a mean under way is applied. The update follows. At last a synchronisation
begins, if one is due.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...base.fetch import PendingArray
from ...config import LossyConfig
from .average import sample, stride_of
from .flags import ReplicaFlags
from .repair import compare, outside, repair
from .synchroniser import Copies, Synchronisation, Synchroniser


@dataclass(frozen=True)
class Mismatch:
    """A report that replicas had different gradients in ``bucket`` of the stream called ``stream``.

    ``outside``: replicas outside the largest class; all if there is no largest class. ``repaired``: "majority", "mean",
    or "" if nothing was repaired.
    """

    stream: str
    bucket: int
    outside: tuple[int, ...]
    repaired: str

    def rows(self) -> list[dict[str, Any]]:
        """Return rows for the log of events: one for each replica that differed."""
        row = {"stream": self.stream, "bucket": self.bucket, "kind": "mismatch", "action": self.repaired}
        return [{**row, "rank": rank} for rank in self.outside]


class FullReplicas:
    """The replicas of this process, out of N that all update everything. All verbs are collective calls of the world.

    ``copies``: for each stream. ``total``: adds up float64[k] over all processes of the world.
    ``renew``: copies the main parameters of the named streams into the model's weights. ``models``: for each local
    replica, weights that are copies of main parameters.
    """

    def __init__(
        self,
        config: LossyConfig,
        copies: Sequence[Copies],
        total: Callable[[np.ndarray], np.ndarray],
        renew: Callable[[Collection[str]], None],
        models: Sequence[Callable[[], Sequence[torch.Tensor]]],
    ) -> None:
        self._config = config
        self._copies = [stream for stream in copies if stream.peers.size > 1]
        self._total = total
        self._renew = renew
        self._models = models
        self.synchroniser = Synchroniser(config, copies, total)
        self._mismatches: list[Mismatch] = []

    def check(self) -> None:
        """Compare the gradients. If they differ, act as ``--replica-check`` says."""
        mode = self._config.replica_check
        if mode == "none":
            return
        for stream in self._copies:
            buckets = stream.gradients()
            differing = compare(stream.peers, buckets)
            if not differing:
                continue
            wrong = {bucket: tuple(outside(fingerprints)) for bucket, fingerprints in differing.items()}
            if mode == "abort":
                parts = [f"bucket {bucket} (ranks {' '.join(map(str, ranks))})" for bucket, ranks in wrong.items()]
                where = f"{stream.name} in {', '.join(parts)}"
                raise SystemExit(f"--replica-check abort: replicas have different gradients of {where}")
            done = repair(stream.peers, buckets, differing) if mode == "repair" else {}
            self._mismatches += [
                Mismatch(stream.name, bucket, ranks, done.get(bucket, "")) for bucket, ranks in wrong.items()
            ]

    def finished(self, gradient: Sequence[Sequence[float]] | None) -> None:
        """Call this after the update. ``gradient``: if it is wanted, |g|^2 for each stream and local replica."""
        changed = self.synchroniser.finished(gradient)
        if changed:
            self._renew(changed)

    def take(self) -> list[Mismatch | Synchronisation]:
        """Return the events since the last call. The process that has the first replica reports mismatches."""
        first = {stream.name for stream in self._copies if 0 in stream.peers.local}
        mismatches = [mismatch for mismatch in self._mismatches if mismatch.stream in first]
        self._mismatches = []
        return [*mismatches, *self.synchroniser.take()]

    @property
    def checks(self) -> bool:
        """Whether gradients are compared."""
        return self._config.replica_check != "none"

    @property
    def interval(self) -> int:
        """Updates between synchronisations, at present; 0 if there are none."""
        return self.synchroniser.interval.current if self._config.synchronises else 0

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Return a context in which all replicas are the mean of the finite ones, with moments. Then they are
        themselves again.

        If all are equal nothing is touched.
        """
        with torch.no_grad():
            self.synchroniser.state_dict()  # ends exchanges in flight
            apart = []
            for stream in self._copies:
                tensors = [[[tensor.detach() for tensor in replica]] for replica in stream.tensors()]
                if compare(stream.peers, tensors):
                    apart.append(stream)
            # The model's weights do not have the result of an exchange in flight yet.
            differ = self._total(np.array([float(bool(apart) or self.synchroniser.moves)]))[0] > 0
            kept = []
            if differ:
                held = [tensor for stream in self._copies for replica in stream.tensors() for tensor in replica]
                held += [tensor for model in self._models for tensor in model()]
                kept = [(tensor, tensor.clone()) for tensor in held]
                Synchroniser(_ONCE, apart, self._total).finished()
                self._renew([stream.name for stream in self._copies])
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in kept:
                    tensor.copy_(value)

    def divergence(self) -> float | None:
        """Return r: the distance of replicas from their mean, relative to its length, over a sample of coordinates.

        ``None`` while a synchronisation is under way: it reports r itself, and leaves no replica to look at.
        """
        if self.synchroniser.under_way:
            return None
        apart = mean = 0.0
        for stream in self._copies:
            rows = np.stack([_sample(parameters) for parameters in stream.parameters()])
            values = stream.peers.gather(rows)
            center = values.mean(axis=0)
            local = len(stream.replicas) / stream.peers.size
            population = sum(tensor.numel() for tensor in stream.parameters()[0])
            scale = local * population / max(1, values.shape[1])
            apart += scale * float(((values - center) ** 2).sum(axis=1).mean())
            mean += scale * float((center**2).sum())
        apart, mean = self._total(np.array([apart, mean])).tolist()
        return float(np.sqrt(apart / mean)) if mean else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state of the replicas of this process, and of the exchange under way."""
        synchroniser = self.synchroniser.state_dict()
        replicas = [[[tensor.clone() for tensor in replica] for replica in stream.tensors()] for stream in self._copies]
        models = [[tensor.clone() for tensor in model()] for model in self._models]
        return {"synchroniser": synchroniser, "replicas": replicas, "models": models}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        with torch.no_grad():
            for stream, replicas in zip(self._copies, state["replicas"], strict=True):
                for tensors, values in zip(stream.tensors(), replicas, strict=True):
                    _copy(tensors, values)
            for model, values in zip(self._models, state["models"], strict=True):
                _copy(model(), values)
        self.synchroniser.load_state_dict(state["synchroniser"])

    def restart(self) -> None:
        """Begin again with replicas that are all equal."""
        self.synchroniser.restart()
        self._mismatches.clear()


_ONCE = ReplicaFlags(param_sync_interval=1, param_sync_state="all:always")


def _copy(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _sample(parameters: Sequence[torch.Tensor]) -> np.ndarray:
    """Return float64: about :data:`SAMPLE` coordinates spread evenly over ``parameters``."""
    stride = stride_of(sum(tensor.numel() for tensor in parameters))
    parts = [sample(tensor.detach().view(-1), stride) for tensor in parameters]
    return PendingArray(torch.cat(parts)).wait().astype(np.float64)
