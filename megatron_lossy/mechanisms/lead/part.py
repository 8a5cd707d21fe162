"""The lead of the parameters that real ranks own: the weights it is made of, and counts that ranks add up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...fetch import Fetched, aside
from ...hooks.buckets import own_shard
from ...mechanism import Part
from ...recovery import copies
from ...transport import LossyGroup
from .compensated import Compensated
from .lag import Counted
from .main_weights import MainWeights

if TYPE_CHECKING:
    from ...hooks.runtime import Lossy


class LeadPart(Part):
    """Keeps the weights of owners before each update, and lets the ranks of a group add up what they count."""

    name = "lead"

    def __init__(self) -> None:
        self._adding: list[tuple[Counted, torch.Tensor, Any]] = []  # sums that are under way

    def attach(self, run: Lossy) -> None:
        self._run = run

    def add_model_chunk(self, ddp: Any) -> None:
        for group, rules, _, buckets in self._exchanged():
            for rule, bucket in zip(rules, buckets, strict=True):
                if rule.weights is None:
                    rule.weights = self._main_weights(bucket, own_shard(bucket, group.rank, group.size))

    def _exchanged(self) -> Iterator[tuple[LossyGroup, list[Compensated], dist.ProcessGroup, Sequence[Any]]]:
        """The groups that send with a lead: their rules, their ranks, and Megatron's buckets."""
        for group, ranks, pairs in self._run.exchanged():
            rules = [rule for rule in group.params if isinstance(rule, Compensated)]
            if rules:
                yield group, rules, ranks, [bucket for _, bucket in pairs]

    def _main_weights(self, bucket: Any, own: torch.Tensor) -> Callable[[], torch.Tensor]:
        # The optimizer comes after DDP.
        found = functools.cache(lambda: MainWeights(self._run.living_optimizers(), bucket, own))
        return lambda: found()()

    def begin_update(self) -> None:
        self._finish_adding()
        for _, rules, ranks, _ in self._exchanged():
            for rule in rules:
                assert rule.weights is not None
                rule.keep(rule.weights())
            if (counted := rules[0].lag.counted) is not None:
                self._begin_adding(counted, ranks)

    def _begin_adding(self, counted: Counted, ranks: dist.ProcessGroup) -> None:
        """Let ``ranks`` add up what they count. It takes until the next update, so that nobody waits."""
        counted.begin_update()
        sums = copies.to_device(counted.sums.copy(), self._run.device)
        work: Any = dist.all_reduce(sums, group=ranks, async_op=True)
        if sums.device.type == "cuda":  # there only a stream waits for the work
            with aside(sums.device):
                work.wait()
                copies.used_here((sums,))
                work = Fetched(sums)
        self._adding.append((counted, sums, work))

    def _finish_adding(self) -> None:
        for counted, sums, work in self._adding:
            found = work.wait()
            counted.coming = found if isinstance(work, Fetched) else Fetched(sums).wait()
        self._adding.clear()

    def begin_saving(self) -> None:
        self._finish_adding()
        if any(True for _ in self._exchanged()):
            self._run.settle()  # else the lead of a gather that is still to come would be lost
