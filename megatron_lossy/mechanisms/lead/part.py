"""The lead of the parameters that real ranks own: the weights it is made of, and counts that ranks add up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...hooks.buckets import main_pieces, own_shard
from ...run.mechanism import Part
from ...transport import LossyGroup
from ...transport.peers import RankPeers
from .compensated import Compensated
from .lag import Sums

if TYPE_CHECKING:
    from ...hooks.runtime import Lossy


class LeadPart(Part):
    """Keeps the weights of owners before each update, and lets the ranks of a group add up what they count."""

    name = "lead"

    def __init__(self) -> None:
        self._sums: list[Sums] = []  # by group, if its counts give the lag

    def attach(self, run: Lossy) -> None:
        self._run = run
        run.events.on(chunk_added=self.add_model_chunk, update_begins=self.begin_update, save_begins=self.begin_saving)

    def add_model_chunk(self, ddp: Any) -> None:
        """Let the rules of new groups find the weights of their owners."""
        for group, rules, ranks, buckets in self._exchanged():
            if rules[0].weights is not None:  # of an earlier chunk
                continue
            for rule, bucket in zip(rules, buckets, strict=True):
                own = own_shard(bucket, group.own, group.shards)
                rule.weights = main_weights(self._run.living_optimizers, bucket, own)
            if (counted := rules[0].lag.counted) is not None:
                self._sums.append(Sums(RankPeers(ranks, buckets[0].param_data.device), [counted]))

    def _exchanged(self) -> Iterator[tuple[LossyGroup, list[Compensated], dist.ProcessGroup, Sequence[Any]]]:
        """Yield the groups that send with a lead: their rules, their ranks, and Megatron's buckets."""
        for group, ranks, pairs in self._run.exchanged():
            rules = [rule for rule in group.params if isinstance(rule, Compensated)]
            if rules:
                yield group, rules, ranks, [bucket for _, bucket in pairs]

    def begin_update(self) -> None:
        """Keep the weights before the update."""
        for _, rules, _, _ in self._exchanged():
            for rule in rules:
                assert rule.weights is not None
                rule.keep(rule.weights())
        for sums in self._sums:
            sums.begin_update()

    def begin_saving(self) -> None:
        """End the sums and the gather that are under way. A collective call."""
        for sums in self._sums:
            sums.finish()
        if any(True for _ in self._exchanged()):
            self._run.settle()  # else the lead of a gather that is still to come would be lost


def main_weights(optimizers: Callable[[], Iterable[Any]], bucket: Any, own: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that returns the float32 weights of the shard ``own`` [shard] of ``bucket``, with padding.

    ``optimizers()``: Megatron's, which come after DDP. The function raises :class:`UsageError` where an optimizer keeps
    such weights to itself.
    """
    shard = own.detach()

    @functools.cache
    def pieces() -> list[tuple[int, torch.Tensor]]:
        whole = shard.dtype == torch.float32
        return [] if whole else main_pieces(optimizers(), bucket, shard, "--param-send compensated")

    def weights() -> torch.Tensor:
        result = shard.float()
        for start, piece in pieces():
            result[start : start + piece.numel()] = piece.view(-1)
        return result

    return weights
