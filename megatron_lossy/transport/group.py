"""One path for every exchange of the buckets that one process group shards.

:class:`LossyGroup` joins a wire with the rules for units that do not arrive, and decides which step counts. Megatron's
hooks, the virtual cluster and :mod:`megatron_lossy.transport.ops` all go through it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.errors import UsageError
from ..base.exchange import Delivery, Exchange, Stream
from ..channel.corruption.applied import Errors, scaled_unit
from ..config import PHASES, LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..recovery import Gradients, GradRecovery, Parameters, Stale
from ..recovery.base import Collective, SentUnits
from .base import Network, Transfer, Wire
from .choice import BucketSpec, rules_for, wire_for
from .network import find_nodes

logger = logging.getLogger(__name__)

#: Seconds that the end of a step waits for reports of others. Later reports delay the units that are sent again.
_PATIENCE = 1.0


class LossyGroup:
    """The exchanges of a list of buckets, in canonical order, over one group, as one of its ranks makes them.

    ``wire``: carries them. ``grads``, ``params``: for each bucket, the rule for units that do not arrive.
    """

    def __init__(self, config: LossyConfig, wire: Wire) -> None:
        self.wire = wire
        self.stream, self.size, self.rank = wire.stream, wire.size, wire.rank
        self._lossless = {phase: wire.lossless(phase) for phase in PHASES}
        #: The errors of the gradients that this rank owns, after their reduction; and the factor between these
        #: gradients and those that the optimizer sees, besides the loss scale.
        self.errors: Errors | None = None
        self.gradient_unit = 1.0
        self.grads: list[GradRecovery] = rules_for(config, "grad", wire)
        self.params: list[Stale] = rules_for(config, "param", wire)
        self.be_one_of(1, 0)
        #: The process group of the members, if they are not all ranks that share the buckets.
        self.members: dist.ProcessGroup | None = None
        #: Objects with a state that the rules share, by name.
        self._shared = {name: one for rule in (*self.grads, *self.params) for name, one in rule.shared.items()}
        self._open: dict[int, int] = {}  # by bucket: a step with gradients that has not been ended yet
        self._made: dict[str, tuple[int, set[int]]] = {}  # by phase: the latest step, and its buckets

    @classmethod
    def create(
        cls,
        config: LossyConfig,
        buckets: Sequence[BucketSpec],
        group: dist.ProcessGroup | None = None,
        stream: Stream = Stream(),
        steps: int | None = None,
    ) -> LossyGroup:
        """Return a lossy group over a whole torch process group (default: the world). Call it on all its ranks.

        ``buckets``: the same list on all ranks. ``steps``: length of the run, if known, to refuse a trace that is too
        short. Raise :class:`UsageError` if the channel cannot serve the group or a packet holds no element.
        """
        size = dist.get_world_size(group)
        try:
            check_refusals(config, Facts(largest_group=size))
        except UsageError as error:
            logger.warning("%s", error)
        nodes = None if config.ranks_of_node is None else find_nodes(group, config.ranks_of_node)
        networks = {phase: Network(config, phase, size, nodes) for phase in PHASES}
        return cls(config, wire_for(config, buckets, networks, range(size), dist.get_rank(group), stream, steps, group))

    def share_copies(self, bucket: int, replicated: Mapping[str, np.ndarray], tensor: dist.ProcessGroup) -> None:
        """Make the ranks of ``tensor``, which hold copies of the same parameters in a bucket, lose the same units.

        ``replicated``: by phase, bool[N, count], units with such parameters, by shard.
        """
        for phase, units in replicated.items():
            self.wire.agree(phase, bucket, units, tensor)
        if self.grads[bucket].protected is not None:
            self.grads[bucket].protected.share(replicated["grad"])

    # --- shards --------------------------------------------------------------------------------------------------

    def be_one_of(self, ranks: int, place: int) -> None:
        """Set the number of ranks that hold one replica together, a member of the group, and the place of this rank there."""
        self.ranks, self.place = ranks, place
        #: The shards of a bucket, each of which another rank owns, and the number of this rank's own.
        self.shards, self.own = self.size * ranks, self.rank * ranks + place

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return [N * shard]: the shards of ``buffer`` that this group exchanges: itself, or a copy of a part of it."""
        return columns(buffer, self.size, self.ranks, self.place).reshape(-1)

    def seen(self, ranges: np.ndarray, shard: int) -> np.ndarray:
        """Return int64[k, 2]: ``ranges`` of a buffer with shards of ``shard`` elements, as they are in :meth:`view`."""
        if self.ranks == 1:
            return ranges
        parts = [inside(ranges, member * self.ranks + self.place, shard) for member in range(self.size)]
        return np.concatenate([part + member * shard for member, part in enumerate(parts)])

    def put_view(self, buffer: torch.Tensor, view: torch.Tensor) -> None:
        """Put a changed :meth:`view` back into ``buffer``."""

    # --- exchanges -----------------------------------------------------------------------------------------------

    def lossless(self, phase: str) -> bool:
        """Return whether nothing can be lost in ``phase``. Its exchanges are then the collectives alone."""
        return self._lossless[phase]

    def reduce_scatter(self, x: Gradients) -> Transfer:
        """Begin the reduce-scatter of the gradients ``x``, and return its transfer.

        A step that :meth:`finish_step` never ends counts when a later one begins.
        """
        self._begin_step(x.bucket, x.exchange.step)
        if self._lossless["grad"]:
            transfer = Transfer(x.collective())
        else:
            self._note_made(x.exchange, x.bucket)
            transfer = self.wire.reduce_scatter(x, self.grads[x.bucket])
        return transfer if self.errors is None else transfer.then(lambda _: self._hit(x, self.errors))

    def note_all_reduce(self, bucket: int, step: int, x: Callable[[], Gradients]) -> None:
        """Note that the gradients ``x()`` of ``bucket`` in ``step`` are about to be all-reduced: all of them arrive."""
        rule = self.grads[bucket]
        if rule.carries_over and not self._lossless["grad"]:
            self._begin_step(bucket, step)
            self.wire.note_all_reduce(x, rule)

    def all_gather(
        self, bucket: int, buffer: torch.Tensor, sent: torch.Tensor, step: int, collective: Collective
    ) -> Transfer:
        """Begin an all-gather into ``buffer`` [N * shard], this rank's replica, keyed by ``step``.

        A unit that does not arrive keeps its old value. ``sent`` [shard]: this rank's part, in ``buffer`` or not; it
        may change until the exchange is over. ``collective``: runs the all-gather.
        """
        if self._lossless["param"]:
            return Transfer(collective())
        exchange = Exchange("param", self.stream, step)
        self._note_made(exchange, bucket)
        return self.wire.all_gather(Parameters(exchange, bucket, buffer, sent, collective), self.params[bucket])

    def _hit(self, x: Gradients, errors: Errors) -> None:
        def unit() -> float | torch.Tensor:
            scale = x.loss_scale()
            return self.gradient_unit if scale is None else scaled_unit(self.gradient_unit, scale)

        errors.hit(x.exchange, x.bucket, x.output, unit)

    def put_stale_aside(self, bucket: int, buffer: torch.Tensor, step: int) -> Callable[[], None] | None:
        """Keep the values of ``buffer`` that differ from the owners' weights of ``step``, before a reliable gather.

        Return a function that puts them back, or ``None`` in a phase without loss.
        """
        if self.lossless("param"):
            return None
        rule = self.params[bucket]
        if not rule.exact:
            replica = buffer.clone()
            return lambda: buffer.copy_(replica)
        delivery = self.delivery("param", step)
        assert delivery is not None, "the gather of the last update is still under way"
        saved = rule.put_aside(buffer, delivery)
        return lambda: rule.put_back(buffer, delivery, saved)

    def sent_bytes(self, phase: str, bucket: int, shard: torch.Tensor) -> int:
        """Return the bytes that this rank sends in an exchange of ``bucket``, whose shards are like ``shard``."""
        coded = None if self._lossless[phase] else self.wire.coded.get(phase)
        return (self.size - 1) * (shard.nbytes if coded is None else coded.payloads[bucket].shard)

    # --- deliveries ----------------------------------------------------------------------------------------------

    def delivery(self, phase: str, step: int) -> Delivery | None:
        """Return the delivery at this rank in ``step``, if it is one of the latest two or can be foreseen.

        ``None`` in a phase without loss.
        """
        return None if self.lossless(phase) else self.wire.delivery(Exchange(phase, self.stream, step))

    def _note_made(self, exchange: Exchange, bucket: int) -> None:
        step, buckets = self._made.get(exchange.phase, (None, set()))
        if step == exchange.step:
            buckets.add(bucket)
        else:
            self._made[exchange.phase] = (exchange.step, {bucket})

    def not_made(self, phase: str, step: int) -> list[int]:
        """Return the buckets that have not been exchanged in ``step``, although they can lose something."""
        if self.lossless(phase):
            return []
        latest, buckets = self._made.get(phase, (None, set()))
        return [bucket for bucket in range(len(self.grads)) if latest != step or bucket not in buckets]

    def restore(self, step: int, lost: dict[int, np.ndarray]) -> None:
        """Restore the parameters that this rank missed in ``step``, the last update before a checkpoint was saved.

        ``lost``: bool[N, count] by bucket; the other buckets lost nothing.
        """
        self.wire.restore(Exchange("param", self.stream, step), lost)

    def told(self) -> list[SentUnits]:
        """Return the records of the units that this rank sent in the latest step that is over, bucket by bucket."""
        protected = (rule.protected for rule in self.grads if rule.protected is not None)
        return [rule.told for rule in protected if rule.told is not None]

    # --- steps ---------------------------------------------------------------------------------------------------

    def prepare(self, step: int, gapless: bool = False) -> None:
        """Prepare the exchanges of ``step``, which come next. ``gapless``: those of the next step come after them."""
        for phase in PHASES:
            self.wire.prepare(Exchange(phase, self.stream, step))
        steps = self.wire.steps("grad")
        if gapless and (steps is None or step + 1 < steps) and self.grads[0].foresight:
            self.wire.prepare(Exchange("grad", self.stream, step + 1))

    def keep_lost(self, bucket: int, step: int) -> None:
        """Keep the units that others report as lost, before the gradients of ``step`` are overwritten."""
        self.wire.take_reports(self.grads[bucket], bucket, _PATIENCE, step)

    def _begin_step(self, bucket: int, step: int) -> None:
        self._count_before(bucket, step)
        self._open[bucket] = step

    def _count_before(self, bucket: int, step: float) -> None:
        """Count the latest step of ``bucket`` if it is before ``step`` and has not been ended."""
        before = self._open.get(bucket)
        if before is None or before >= step:
            return
        del self._open[bucket]
        rule = self.grads[bucket]
        self.wire.take_reports(rule, bucket, 0.0, before)
        rule.finish_step(before, True)

    def _count_all(self) -> None:
        for bucket in list(self._open):
            self._count_before(bucket, math.inf)

    def finish_step(self, step: int, successful: bool) -> None:
        """Report to the recovery rules whether the optimizer used the gradients of ``step``."""
        until = time.monotonic() + _PATIENCE
        for bucket, rule in enumerate(self.grads):
            self._count_before(bucket, step)
            self._open.pop(bucket, None)
            self.wire.take_reports(rule, bucket, max(until - time.monotonic(), 0.0), step)
        for rule in (*self.grads, *self.params):
            rule.finish_step(step, successful)

    def close(self) -> None:
        self._count_all()
        self.wire.close()

    def restart(self) -> None:
        """Begin again with replicas that are all equal, as after loading a checkpoint."""
        self._open = {}
        self.wire.restart()
        for rule in (*self.grads, *self.params):
            rule.restart()

    def state_dict(self) -> dict[str, list[Any]]:
        """Return the states of the rules, by phase, and their common data. The latest step counts unless ended."""
        self._count_all()
        for bucket, rule in enumerate(self.grads):
            self.wire.take_reports(rule, bucket, math.inf)
        states = {"grad": self.grads, "param": self.params} | {name: [one] for name, one in self._shared.items()}
        return {name: [one.state_dict() for one in each] for name, each in states.items()}

    def load_state_dict(self, state: dict[str, list[Any]], device: torch.device) -> None:
        """Restore :meth:`state_dict`, with tensors on ``device``."""
        self._open = {}
        for name, one in self._shared.items():
            if name in state:
                one.load_state_dict(*state[name])
        for phase, rules in (("grad", self.grads), ("param", self.params)):
            for rule, one in zip(rules, state[phase], strict=True):
                rule.load_state_dict(one, device)


def inside(ranges: np.ndarray, number: int, shard: int) -> np.ndarray:
    """Return int64[k, 2]: the parts of ``ranges`` in shard ``number``, of ``shard`` elements, counted from its first one."""
    parts = np.clip(ranges - number * shard, 0, shard)
    return parts[parts[:, 0] < parts[:, 1]]


def columns(buffer: torch.Tensor, members: int, ranks: int, place: int) -> torch.Tensor:
    """Return [members, shard]: the shards of ``buffer`` that the ranks of ``place`` own, of ``ranks`` a member."""
    return buffer.view(members, ranks, -1)[:, place]
