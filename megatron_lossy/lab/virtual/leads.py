"""The values that owners of a virtual cluster send with a lead (``--param-send compensated``).

Between updates the parameter buffers hold the sent values, V, so that :class:`Versions` keeps the values that receivers
have. The owners' weights, W, are kept beside them. They are put back for an owner in its own shard, the optimizer,
evaluation with the owners' weights, and a checkpoint.

On a real rank the rule puts the lead on its shard only while it is sent (:meth:`.Compensated.send`): there receivers have
buffers of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...mechanisms.lead.compensated import Compensated
from ...mechanisms.lead.main_weights import MainWeights
from ...mechanisms.lead.sums import Sums
from ...transport import LossyGroup
from ...transport.peers import LocalPeers
from .sending import Sending, seen


class Leads(Sending):
    """The leads of all buckets of a stream. The values of ``buffers`` are the owners' weights while no lead is on them.

    ``groups``: one for every worker. ``buckets``: Megatron's. ``optimizers``: returns Megatron's, once they exist.
    """

    changes = True

    def __init__(
        self, groups: Sequence[LossyGroup], buckets: Sequence[Any], optimizers: Callable[[], list[Any]]
    ) -> None:
        self._of_stream = partial(seen, groups[0])
        super().__init__([self._of_stream(bucket.param_data) for bucket in buckets], len(groups))
        self._groups = groups
        self._rules = [[rule for rule in group.params if isinstance(rule, Compensated)] for group in groups]
        self._main = functools.cache(
            lambda bucket: MainWeights(optimizers(), buckets[bucket], buckets[bucket].param_data)
        )
        counted = [one for rules in self._rules if (one := rules[0].lag.counted) is not None]
        self._sums = [Sums(LocalPeers(len(counted)), counted)] if counted else []
        self._whole: dict[int, torch.Tensor] = {}
        for worker, rules in enumerate(self._rules):
            for bucket, rule in enumerate(rules):
                rule.weights = partial(self._shard, worker, bucket)

    def _shard(self, worker: int, bucket: int) -> torch.Tensor:
        return self._whole[bucket].chunk(len(self._groups))[worker]

    @contextlib.contextmanager
    def _optimizers_weights(self) -> Iterator[None]:
        self._whole = {bucket: self._of_stream(self._main(bucket)()) for bucket in range(len(self.buffers))}
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
        self._count(step)

    def _count(self, step: int) -> None:
        """Let every worker count its losses of ``step``, once, if the counts give its lag."""
        for group, rules in zip(self._groups, self._rules, strict=True):
            for bucket, rule in enumerate(rules):
                if rule.lag.counted is not None:
                    delivery = group.delivery("param", step)
                    assert delivery is not None
                    rule.lag.counted.count(bucket, rule.units, delivery)
