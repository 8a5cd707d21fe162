"""The buckets of one stream, as all virtual workers exchange them.

Their twin is Megatron's reduce-scatter: the backend of real ranks adds up in an order of its own, this module in the order
of the workers. For two workers the bits are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ...base.exchange import Delivery, Exchange, Stream, units_of
from ...channel.corruption import Corruption
from ...config import LossyConfig
from ...hooks.buckets import errors_of_owner
from ...hooks.exchanges import specs_of
from ...recovery import Gradients, LossScale
from ...transport import Transfer
from .in_memory import groups_in_memory
from .sending import Rounding, seen, sending_of
from .versions import Versions

# Sums are added in pieces that fit into a core's cache, and each source is cleared while it is there.
_PIECE = 2**17


class StreamBuckets:
    """The buckets of one stream: their losses and rules for every worker, the sum, and the replicas.

    ``pairs``: Megatron's (buffer, bucket) in canonical order. ``workers``: the number of those that exchange: with sites
    these, of ``ranks_inside`` workers each, and the stream is that of those at ``place`` in them. ``unit``: the sums of the
    workers' gradients relative to those of ranks. ``corruption``: decides which errors hit the owners. ``steps``:
    length of the run, if known. ``optimizers``: returns Megatron's, once they exist. ``members``: the workers' ranks
    among ``ranks``; by default there are no others. Raises :class:`UsageError` if the loss flags do not fit.
    """

    def __init__(
        self,
        config: LossyConfig,
        pairs: list[Any],
        stream: Stream,
        workers: int,
        unit: float,
        corruption: Corruption,
        steps: int | None,
        optimizers: Callable[[], list[Any]],
        members: range | None = None,
        ranks: int | None = None,
        ranks_inside: int = 1,
        place: int = 0,
    ) -> None:
        members, ranks = members or range(workers), ranks or workers
        self.pairs = pairs
        self.buckets = buckets = [bucket for _, bucket in pairs]
        self.stream = stream
        specs = specs_of(pairs, workers * ranks_inside)
        self._memory, self.groups = groups_in_memory(config, specs, stream, members, ranks, steps)
        self.cut = self._memory.cut
        for group in self.groups:
            group.be_one_of(ranks_inside, place)
            if config.errs and group.shards > 1:
                group.errors = errors_of_owner(corruption, stream, pairs, group.shards, group.own, group.own)
                group.gradient_unit = unit
        self.sums = [torch.empty_like(seen(self.groups[0], bucket.grad_data)).view(-1) for bucket in buckets]
        # Owners that add up pieces do so in float32, and round once.
        coded = self._memory.coded[0]
        wide = config.transport == "pieces" or "grad" in coded
        self._wide = config.transport == "pieces" and "grad" in coded  # in which a site adds up
        self._totals = [total.float() if wide and total.element_size() < 4 else total for total in self.sums]
        self._begun: list[Transfer] = []  # the transfers of this iteration, worker by worker
        self._inside: list[torch.Tensor] = []  # by bucket: the sums of the workers of a site that have had their turn
        buffers = [seen(self.groups[0], bucket.param_data) for bucket in buckets]
        self.versions = Versions(buffers, self.cut["param"], units_of(self.cut["param"]), workers)
        self.sending = sending_of(self.groups, buckets, optimizers)
        if "param" in coded:
            self.sending = Rounding(self.sending, workers, coded["param"])

    @contextlib.contextmanager
    def turn(self, worker: int) -> Iterator[None]:
        """Return a context in which the parameter buffers hold the replica of ``worker``."""
        with torch.no_grad():
            self.versions.swap_in(worker)
        try:
            with self.sending.owner(worker):
                yield
        finally:
            with torch.no_grad():
                self.versions.swap_out()

    def share_sums(self, other: StreamBuckets) -> None:
        """Use the sums of ``other``, which reduces its gradients at another time."""
        self.sums, self._totals = other.sums, other._totals

    def collect(self, worker: int, step: int, loss_scale: LossScale, gapless: bool) -> None:
        """Take the gradient of ``worker`` out of Megatron's buffers, which are zero afterwards.

        Workers of a site add up theirs, in order, and the last one sends the sum. ``loss_scale``, ``gapless``: see
        :class:`Gradients`.
        """
        inside = self.groups[0].ranks
        taken = self._add_inside(worker % inside == 0) if inside > 1 else [bucket.grad_data for bucket in self.buckets]
        if (worker + 1) % inside:
            return
        worker //= inside
        first = not self._begun
        begun = []
        for number, (sent, cut) in enumerate(zip(taken, self.cut["grad"], strict=True)):
            output, gradients = self.sums[number][worker * cut.shard : (worker + 1) * cut.shard], sent
            if "grad" in self._memory.coded[worker] and gradients.element_size() < 4:
                gradients = gradients.float()  # owners add up more than half precision can hold
                sent.zero_()

            def add(gradients: torch.Tensor = gradients, total: torch.Tensor = self._totals[number]) -> None:
                _move(gradients, total, add=not first)

            exchange = Exchange("grad", self.stream, step)
            x = Gradients(exchange, number, gradients, output, add, False, loss_scale, gapless)
            begun.append(self.groups[worker].reduce_scatter(x))
        self._begun += begun

    def _add_inside(self, first: bool) -> list[torch.Tensor]:
        """Move the gradients of a worker into the sums of its site, and return these. ``first``: of a new site."""
        if not self._inside:
            self._inside = [torch.empty_like(total, dtype=torch.float32 if self._wide else None) for total in self.sums]
        for bucket, total in zip(self.buckets, self._inside, strict=True):
            _move(seen(self.groups[0], bucket.grad_data), total.view(self.groups[0].size, -1), add=not first)
        return self._inside

    def reduce(self, scale: float) -> None:
        """Let every owner correct its shard of the sum, and put ``scale`` times the result into Megatron's buffers."""
        for rounded, total in zip(self.sums, self._totals, strict=True):
            if rounded is not total:
                rounded.copy_(total)
        for transfer in self._begun:
            transfer.wait()
        self._begun = []
        for bucket, total in zip(self.buckets, self.sums, strict=True):
            into = seen(self.groups[0], bucket.grad_data)
            torch.mul(total.view_as(into), scale, out=into)

    def lost(self, step: int) -> np.ndarray:
        """Return bool[N receivers, N sources, units]: the units that the update of ``step`` loses."""
        delivery = self.delivery("param", step)
        return np.zeros_like(self.versions.held, dtype=bool) if delivery is None else ~delivery.arrived

    def delivery(self, phase: str, step: int) -> Delivery | None:
        """Return the delivery at all workers in ``step``; ``None`` in a phase without loss."""
        return None if self.groups[0].lossless(phase) else self._memory.foresee(Exchange(phase, self.stream, step))


def _move(source: torch.Tensor, target: torch.Tensor, add: bool) -> None:
    pieces = 1 if source.device.type != "cpu" else max(1, source.numel() // _PIECE)
    for part, into in zip(source.chunk(pieces), target.chunk(pieces), strict=True):
        if add:
            into.add_(part)
        else:
            into.copy_(part)
        part.zero_()
