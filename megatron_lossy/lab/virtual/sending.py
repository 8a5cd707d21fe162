"""The values that the owners of a stream of virtual workers send, and their replicas' values for monitors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...hooks.buckets import used_in
from ...mechanisms.lead.compensated import Compensated
from ...mechanisms.lead.lag import Sums
from ...mechanisms.lead.part import main_weights
from ...run.monitor import Replicas
from ...transport import LossyGroup
from ...transport.coded import CodedBuckets
from ...transport.group import columns
from ...transport.peers import LocalPeers
from .versions import Versions


def seen(group: LossyGroup, buffer: torch.Tensor) -> torch.Tensor:
    """Return the shards of ``buffer`` that the N members of ``group`` exchange: all of it, or [N, shard] apart."""
    return buffer if group.ranks == 1 else columns(buffer, group.size, group.ranks, group.place)


class Sending:
    """The values that the owners of a stream of virtual workers send: their weights, unless a mechanism sends others.

    Between updates the parameter ``buffers``, [N * shard] or [N, shard] for every bucket, hold the values that were sent. If these are
    not the owners' weights (:attr:`changes`), the weights are kept as well.
    """

    #: Whether :meth:`change` does anything.
    changes: bool = False

    def __init__(self, buffers: Sequence[torch.Tensor], workers: int) -> None:
        self.buffers = buffers
        self._workers = workers
        self._kept: list[torch.Tensor] | None = None

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        """The owners' weights of every bucket."""
        return self.buffers if self._kept is None else self._kept

    @contextlib.contextmanager
    def owner(self, worker: int) -> Iterator[None]:
        """Return a context in which the shards of ``worker`` hold its weights."""
        if self._kept is None:
            yield
            return
        shards = [buffer.chunk(self._workers)[worker] for buffer in self.buffers]
        sent = [shard.clone() for shard in shards]
        for shard, weights in zip(shards, self._kept, strict=True):
            shard.copy_(weights.chunk(self._workers)[worker])
        try:
            yield
        finally:
            for shard, value in zip(shards, sent, strict=True):
                shard.copy_(value)

    def withdraw(self) -> None:
        """Put the owners' weights into the buffers."""
        if self._kept is not None:
            for buffer, weights in zip(self.buffers, self._kept, strict=True):
                buffer.copy_(weights)
            self._kept = None

    def before_update(self) -> None:
        """Note that the owners' weights, which are in the buffers, are about to be updated."""

    def after_update(self) -> None:
        """Note that the owners' weights have been updated."""

    def send(self, step: int) -> None:
        """Put what owners send after the update of ``step`` into the buffers. It may be called again for ``step``."""
        if self.changes:
            self._kept = [buffer.clone() for buffer in self.buffers]
            self.change(step)

    def change(self, step: int) -> None:
        """Turn the owners' weights in the buffers, those of the update of ``step``, into what they send."""

    def restart(self) -> None:
        """Begin again with the owners' weights of a checkpoint in the buffers."""
        self._kept = None


class Leads(Sending):
    """Values with a lead (``--param-send compensated``), put back for an owner in its own shard, the optimizer and a checkpoint.

    On a real rank the rule puts the lead on its shard only while it is sent (:meth:`.Compensated.send`): there receivers
    have buffers of their own. ``groups``: one for every worker. ``buckets``: Megatron's. ``optimizers``: returns Megatron's, once they exist.
    """

    changes = True

    def __init__(
        self, groups: Sequence[LossyGroup], buckets: Sequence[Any], optimizers: Callable[[], list[Any]]
    ) -> None:
        self._of_stream = partial(seen, groups[0])
        super().__init__([self._of_stream(bucket.param_data) for bucket in buckets], len(groups))
        self._groups = groups
        self._rules = [[rule for rule in group.params if isinstance(rule, Compensated)] for group in groups]
        self._main = [main_weights(optimizers, bucket, bucket.param_data) for bucket in buckets]
        counted = [counter for rules in self._rules if (counter := rules[0].lag.counted) is not None]
        self._sums = [Sums(LocalPeers(len(counted)), counted)] if counted else []
        self._whole: dict[int, torch.Tensor] = {}
        for worker, rules in enumerate(self._rules):
            for bucket, rule in enumerate(rules):
                rule.weights = partial(self._shard, worker, bucket)

    def _shard(self, worker: int, bucket: int) -> torch.Tensor:
        return self._whole[bucket].chunk(len(self._groups))[worker]

    @contextlib.contextmanager
    def _optimizers_weights(self) -> Iterator[None]:
        self._whole = {bucket: self._of_stream(weights()) for bucket, weights in enumerate(self._main)}
        try:
            yield
        finally:
            self._whole = {}

    def before_update(self) -> None:
        with self._optimizers_weights():
            for worker, rules in enumerate(self._rules):
                for bucket, rule in enumerate(rules):
                    rule.keep(self._shard(worker, bucket))

    def after_update(self) -> None:
        for sums in self._sums:
            sums.begin_update()
            sums.finish()

    def change(self, step: int) -> None:
        with self._optimizers_weights():
            for worker, rules in enumerate(self._rules):
                for rule, buffer in zip(rules, self.buffers, strict=True):
                    rule.put_lead(step, buffer.chunk(len(self._groups))[worker])
        # Every worker counts its losses of the step, once, if the counts give its lag.
        for group, rules in zip(self._groups, self._rules, strict=True):
            for bucket, rule in enumerate(rules):
                if rule.lag.counted is not None:
                    delivery = group.delivery("param", step)
                    assert delivery is not None
                    rule.lag.counted.count(bucket, rule.units, delivery)


class Rounding(Sending):
    """The values that ``inner`` sends, as they are decoded from codes (``--param-wire``)."""

    changes = True

    def __init__(self, inner: Sending, workers: int, coded: CodedBuckets) -> None:
        super().__init__(inner.buffers, workers)
        self._inner, self._coded = inner, coded

    def before_update(self) -> None:
        self._inner.before_update()

    def after_update(self) -> None:
        self._inner.after_update()

    def change(self, step: int) -> None:
        self._inner.change(step)
        for bucket, buffer in enumerate(self.buffers):
            rounded = buffer.reshape(-1)
            self._coded.round_parameters(bucket, rounded)
            buffer.copy_(rounded.view_as(buffer))


def sending_of(groups: Sequence[LossyGroup], buckets: Sequence[Any], optimizers: Callable[[], list[Any]]) -> Sending:
    """Return the values that the owners of a stream send.

    ``groups``: one for every worker. ``buckets``: Megatron's. ``optimizers``: returns Megatron's, once they exist.
    """
    if groups[0].params and isinstance(groups[0].params[0], Compensated):
        return Leads(groups, buckets, optimizers)
    return Sending([seen(groups[0], bucket.param_data) for bucket in buckets], len(groups))


class VirtualSampler(Replicas):
    """The replicas that ``versions`` keeps. ``group``: that of a worker. ``sending``: has the owners' weights."""

    def __init__(
        self, group: LossyGroup, pairs: Sequence[tuple[Any, Any]], versions: Versions, sending: Sending
    ) -> None:
        workers, _, units = versions.held.shape
        shards = [bucket.param_data.numel() // group.shards for _, bucket in pairs]
        weights = [buffer.reshape(-1) for buffer in sending.weights]
        super().__init__(group.stream, workers, range(workers), units, shards, weights, partial(used_in, pairs, group))
        self._versions = versions

    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        values = [self._versions.everyone(number, chosen) for number, chosen in enumerate(places)]
        everyone = torch.cat(values, dim=1).double().cpu().numpy()
        owners = np.concatenate([chosen // shard for chosen, shard in zip(places, self.shards, strict=True)])
        everyone[owners, np.arange(len(owners))] = self.own(places)  # which may differ from the sent values
        return everyone
