"""One path for every exchange of the buckets that one process group shards.

:class:`LossyGroup` joins a transport, which says what arrived, with the rules for what did not. Megatron's hooks, the
virtual cluster and :mod:`megatron_lossy.transport.ops` all go through it.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .. import theory
from ..channel.corruption import Errors
from ..channel.draws import generator
from ..config import PHASES, LossyConfig
from ..errors import UsageError
from ..exchange import BucketUnits, Delivery, Exchange, Stream, cut, units_of
from ..recovery import Compensated, ParamPriority, Priority, Protection, Reduction, Rule, Stale
from ..recovery.priority import Told
from ..registry import GRAD_RECOVERIES
from .base import Collective, Transfer, Transport
from .collective import CollectiveTransport
from .counted import Counted
from .drawn import Latest, Networks, check_links
from .network import Network, check_owners, check_ranks, find_nodes
from .pieces import Pieces

logger = logging.getLogger(__name__)

#: Seconds that the end of a step waits for others to say what arrived there; later they delay what is sent again.
_PATIENCE = 1.0


@dataclass(frozen=True)
class BucketSpec:
    """A bucket: elements of one of its N shards, and the dtypes that cross the wire."""

    shard: int
    grad_dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.float32


def cut_buckets(config: LossyConfig, buckets: Sequence[BucketSpec]) -> dict[str, list[BucketUnits]]:
    """How each bucket is cut into units, by phase. Raises :class:`UsageError` if a packet holds no element."""
    shards = [bucket.shard for bucket in buckets]
    result = {}
    for phase in PHASES:
        itemsizes = [getattr(bucket, f"{phase}_dtype").itemsize for bucket in buckets]
        result[phase], _ = cut(shards, itemsizes, config.loss_unit, config.packet_bytes)
    return result


def protection_of(config: LossyConfig) -> Protection:
    """What the flags say about priorities."""

    def draw(exchange: Exchange, source: int, number: int) -> np.ndarray:
        return generator(config.loss_seed, exchange, source, number).random(config.grad_priority_sample)

    return Protection(
        config.grad_priority,
        config.grad_priority_fraction,
        config.grad_priority_scope,
        config.grad_priority_sample,
        config.grad_residual_bound,
        config.lossy_self,
        draw,
    )


@functools.cache
def _warn_of_no_priority(config: LossyConfig) -> None:
    logger.warning(
        "--grad-priority none with %s: large gradients that are lost come back at full size in a later step, which may have "
        "been clipped less; consider packet-mean (docs/smart.md)",
        config.grad_recovery,
    )


class LossyGroup:
    """The exchanges of a list of buckets, in canonical order, over one group, as one of its ranks makes them.

    ``rules``: by phase, for each bucket, what is done about missing units. The deliveries of the latest exchanges that
    were made here are kept: that of the parameters says what is stale in this rank's replica.
    """

    def __init__(self, config: LossyConfig, transport: Transport) -> None:
        self.transport = transport
        self.stream, self.size, self.rank = transport.stream, transport.size, transport.rank
        sends = {"plain": Stale, "compensated": Compensated}
        kinds: dict[str, type[Rule]] = {
            "grad": GRAD_RECOVERIES.load(config.grad_recovery),
            "param": sends[config.param_send],
        }
        if config.at_sender and config.grad_priority == "none":
            _warn_of_no_priority(config)
        #: What hits the gradients that this rank owns after their reduction, and what these are multiplied with beside the
        #: loss scale, compared with those that the optimizer sees.
        self.errors: Errors | None = None
        self.gradient_unit = 1.0
        self._given_lead = config.lead
        self.rules: dict[str, list[Any]] = {
            phase: [kind(units, self.rank) for units in transport.cut[phase]] for phase, kind in kinds.items()
        }
        protection = protection_of(config) if config.at_sender else None
        for rule in self.rules["grad"]:
            if protection is not None:
                rule.priority = Priority(protection, rule.units, self.rank)
            # A sender that chooses removes what is lost itself, where it is known beforehand.
            rule.from_pieces = transport.in_pieces and (transport.observed or not rule.at_sender)
        for rule in self.rules["param"] if config.param_priority != "none" else ():
            rule.priority = ParamPriority(config.param_priority_fraction, rule.units)
        self._made_last = Latest()
        self._told: dict[int, Told] = {}  # by bucket
        self._open: dict[int, int] = {}  # by bucket: a step with gradients of which nobody has said whether it counts
        #: Whether parameters are sent with a lead.
        self.compensates = config.param_send == "compensated" and not self.lossless("param")
        counts = self.compensates and config.lead is None
        known = counts and transport.lag(Exchange("param", self.stream, 0)) is not None
        #: What receivers count, where nothing else says how late they are.
        self.counted = Counted() if counts and not known else None
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
        """A lossy group over a whole torch process group (default: the world). Call it on all its ranks.

        ``buckets``: the same list on all ranks. ``steps``: length of the run, if known, to refuse a trace that is too
        short. Raises :class:`UsageError` if the channel cannot serve the group or a packet holds no element.
        """
        size = dist.get_world_size(group)
        try:
            check_ranks(config, size)
        except UsageError as error:
            logger.warning("%s", error)
        nodes = find_nodes(group, config.ranks_per_node) if config.lossy_links == "inter-node" else None
        networks = {phase: Network(config, phase, size, nodes) for phase in PHASES}
        return cls.among(config, buckets, networks, range(size), dist.get_rank(group), stream, steps, group)

    @classmethod
    def among(
        cls,
        config: LossyConfig,
        buckets: Sequence[BucketSpec],
        networks: Networks,
        members: Sequence[int],
        rank: int,
        stream: Stream,
        steps: int | None,
        group: dist.ProcessGroup | None = None,
    ) -> LossyGroup:
        """As :meth:`create`, for the rank ``rank`` of ``members``, which are ranks of the full group of ``networks``.

        ``group``: their torch process group.
        """
        check_owners(config)
        parts = cut_buckets(config, buckets)
        check_links(networks, stream, parts, len(members), steps)
        if config.transport == "pieces":
            pieces = Pieces(networks, stream, members, rank, parts, group=group)
            pieces.draws_sent = config.at_sender
            return cls(config, pieces)
        if config.transport == "udp":
            from .udp.process import open_transport  # which starts a thread

            dtypes = {phase: [getattr(bucket, f"{phase}_dtype") for bucket in buckets] for phase in PHASES}
            return cls(config, open_transport(config, dtypes, networks, stream, members, rank, parts, group))
        return cls(config, CollectiveTransport(networks, stream, members, rank, parts))

    @property
    def chooses_copies(self) -> bool:
        """Whether copies of a parameter could lose different things: to a network, or as their senders choose."""
        return self.transport.observed or any(rule.at_sender for rule in self.rules["grad"])

    def share_copies(self, bucket: int, replicated: Mapping[str, np.ndarray], tensor: dist.ProcessGroup) -> None:
        """Let the ranks of ``tensor``, which have copies of the same parameters in a bucket, lose the same of them.

        ``replicated``: by phase, bool[N, count], units with such parameters, by shard. Drawn losses are the same anyway; but
        what a sender chooses depends on what else is in a unit, which they have each to themselves.
        """
        for phase, units in replicated.items():
            if self.transport.observed:
                self.transport.agree(phase, bucket, units, tensor)
        priority = self.rules["grad"][bucket].priority
        if priority is not None:
            priority.always = replicated["grad"]

    # --- exchanges -----------------------------------------------------------------------------------------------

    def lossless(self, phase: str) -> bool:
        """Whether nothing can be lost in ``phase``: its exchanges need not go through here."""
        return self.transport.lossless(phase)

    def reduce_scatter(
        self,
        bucket: int,
        buffer: torch.Tensor,
        output: torch.Tensor,
        step: int,
        collective: Collective,
        averaged: bool = False,
        loss_scale: torch.Tensor | float | None = None,
        following: int | None = None,
    ) -> Transfer:
        """Begin a reduce-scatter of ``buffer`` [N * shard] into ``output`` [shard], keyed by ``step``.

        ``buffer`` changes in place. ``collective``: runs the reduce-scatter. ``averaged``: it divides by N
        (``ReduceOp.AVG``). ``loss_scale``: what the gradients were multiplied with. ``following``: the step of the
        next reduce-scatter, if it is known. A step of which nobody says how it ended (:meth:`finish_step`) counts when a
        later one begins.
        """
        self._begin_step(bucket, step)
        exchange = Exchange("grad", self.stream, step)
        reduction = self._reduction(exchange, averaged, loss_scale, following)
        return self._begin(exchange, bucket, self.rules["grad"][bucket], buffer, output, collective, reduction)

    def wants_all_reduced(self, bucket: int) -> bool:
        """Whether :meth:`note_all_reduce` does anything. Of a sum nobody can tell the pieces."""
        carries_over = self.rules["grad"][bucket].carries_over
        return carries_over and not self.lossless("grad") and not self.transport.in_pieces

    def note_all_reduce(
        self,
        bucket: int,
        buffer: torch.Tensor,
        step: int,
        loss_scale: torch.Tensor | float | None = None,
        following: int | None = None,
    ) -> None:
        """``buffer`` [N * shard], the gradients of ``step``, is about to be all-reduced: all of it will arrive."""
        self._begin_step(bucket, step)
        rule = self.rules["grad"][bucket]
        exchange, members = Exchange("grad", self.stream, step), self.transport.members
        parts = self.transport.cut["grad"]
        everything = np.ones((1, self.size, units_of(parts)), dtype=bool)
        me = members[self.rank : self.rank + 1]
        delivery = Delivery(exchange, members, me, everything, parts, everything[0])
        rule.before(buffer, delivery, self._reduction(exchange, False, loss_scale, following))

    def _reduction(
        self, exchange: Exchange, averaged: bool, loss_scale: torch.Tensor | float | None, following: int | None
    ) -> Reduction:
        if following is None or self.transport.observed:
            return Reduction(averaged, loss_scale, exchange=exchange)
        foresee = functools.partial(self._foresee_grads, replace(exchange, step=following))
        return Reduction(averaged, loss_scale, foresee, exchange=exchange)

    def all_gather(
        self, bucket: int, buffer: torch.Tensor, sent: torch.Tensor, step: int, collective: Collective
    ) -> Transfer:
        """Begin an all-gather into ``buffer`` [N * shard], this rank's replica, keyed by ``step``.

        A unit that does not arrive keeps the value that it had before. ``sent`` [shard]: this rank's part, in ``buffer``
        or not; it may change until the exchange is over. ``collective``: runs the all-gather.
        """
        exchange, rule = Exchange("param", self.stream, step), self.rules["param"][bucket]
        reduction = Reduction(sent=sent, step=step, lead=self.lead(step))
        return self._begin(exchange, bucket, rule, buffer, buffer, collective, reduction)

    def lead(self, step: int) -> tuple[float, float]:
        """c and r of the lead that ``--param-send compensated`` gives to the parameters of ``step``."""
        if not self.compensates:
            return 0.0, 0.0
        known = self.transport.lag(Exchange("param", self.stream, step))
        if self._given_lead is not None:
            return self._given_lead if known is None or known[0] else (0.0, 0.0)
        if known is None:
            assert self.counted is not None
            known = self.counted.lag()
        return theory.lead(*known)

    def before_update(self, sent: Sequence[torch.Tensor]) -> None:
        """The own shard [shard] of every bucket, sent as ``sent``, is about to be updated."""
        if self.compensates:
            for rule, shard in zip(self.rules["param"], sent, strict=True):
                rule.before_update(shard)

    def _begin(
        self,
        exchange: Exchange,
        bucket: int,
        rule: Rule,
        buffer: torch.Tensor,
        output: torch.Tensor,
        collective: Collective,
        reduction: Reduction,
    ) -> Transfer:
        if self.lossless(exchange.phase):
            return Transfer(collective(), lambda: self._hit(exchange, bucket, output, reduction))
        self._note_made(exchange, bucket)
        grads, kept = exchange.phase == "grad", None
        combines = self.transport.in_pieces and grads
        chooses = grads and rule.at_sender
        if chooses:
            self._ask_for_late_reports(bucket)
        if not combines or chooses:
            unknown = self.transport.observed if chooses else self.transport.in_pieces
            with torch.no_grad():
                kept = rule.before(buffer, None if unknown else self._foresee(exchange), reduction)
        if chooses and self.transport.observed:
            self.transport.require(exchange, bucket, rule.must)
        elif not grads and rule.priority is not None:
            assert reduction.sent is not None
            chosen = rule.priority.choose(reduction.sent, exchange.step)
            self.transport.require(exchange, bucket, np.repeat(chosen[None], self.size, axis=0))
        elif chooses:
            self.transport.recovered(exchange, rule.units, rule.final.mask)
        transfer = self.transport.begin(exchange, bucket, buffer, collective, reduction.sent)
        pieces = transfer.pieces

        def after(delivery: Delivery) -> None:
            self._made_last.put(exchange, delivery)
            if exchange.phase == "param" and self.counted is not None:
                self.counted.count(bucket, rule.units, delivery)
            if combines:
                rule.combine(pieces, output, delivery, kept, reduction)
            else:
                rule.after(output, delivery, kept, reduction)
            self._hit(exchange, bucket, output, reduction)

        return transfer.then(after)

    def _hit(self, exchange: Exchange, bucket: int, output: torch.Tensor, reduction: Reduction) -> None:
        if self.errors is not None and exchange.phase == "grad":
            scale = 1.0 if reduction.loss_scale is None else reduction.loss_scale
            with torch.no_grad():
                self.errors.hit(exchange, bucket, output, lambda: self.gradient_unit * float(scale))

    def keep_sent(self, bucket: int, sent: torch.Tensor) -> None:
        """The exchange of ``sent`` is over, and it will be updated: what :meth:`before_update` says, for one bucket."""
        if self.compensates:
            self.rules["param"][bucket].before_update(sent)
            if self.counted is not None:
                self.counted.coming = self.counted.sums.copy()
                self.counted.begin_update()

    def put_stale_aside(self, bucket: int, buffer: torch.Tensor, step: int) -> Callable[[], None] | None:
        """Before ``buffer`` is gathered reliably: keep what of it is not the owners' weights since ``step``.

        Returns what puts it back, or ``None`` in a phase without loss.
        """
        if self.lossless("param"):
            return None
        if self.compensates:  # what arrived is ahead of them
            replica = buffer.clone()
            return lambda: buffer.copy_(replica)
        delivery, rule = self.delivery("param", step), self.rules["param"][bucket]
        assert delivery is not None, "the gather of the last update is still under way"
        kept = rule.before(buffer, delivery, Reduction())
        return lambda: rule.after(buffer, delivery, kept, Reduction())

    # --- deliveries ----------------------------------------------------------------------------------------------

    def delivery(self, phase: str, step: int) -> Delivery | None:
        """What arrived at this rank in the exchange of ``step``, if it is one of the latest two or can be foreseen.

        ``None`` in a phase without loss.
        """
        return None if self.lossless(phase) else self._foresee(Exchange(phase, self.stream, step))

    def _foresee(self, exchange: Exchange) -> Delivery | None:
        known = self._made_last.get(exchange)
        return known if known is not None else self.transport.foresee(exchange)

    def _foresee_grads(self, exchange: Exchange) -> Delivery | None:
        steps = self.transport.steps(exchange.phase)
        # Beyond the end of a trace nothing is lost; if such a step comes, it is refused.
        return None if steps is not None and exchange.step >= steps else self.transport.foresee(exchange)

    def _note_made(self, exchange: Exchange, bucket: int) -> None:
        step, buckets = self._made.get(exchange.phase, (None, set()))
        if step == exchange.step:
            buckets.add(bucket)
        else:
            self._made[exchange.phase] = (exchange.step, {bucket})

    def not_made(self, phase: str, step: int) -> list[int]:
        """The buckets that have not been exchanged in ``step``, though they can lose something."""
        if self.lossless(phase):
            return []
        latest, buckets = self._made.get(phase, (None, set()))
        return [bucket for bucket in range(len(self.rules[phase])) if latest != step or bucket not in buckets]

    def restore(self, step: int, lost: dict[int, np.ndarray]) -> None:
        """This rank missed these parameters of ``step``, the last update before a checkpoint was saved.

        ``lost``: bool[N, count] by bucket; of the others nothing.
        """
        parts, members = self.transport.cut["param"], self.transport.members
        arrived = np.ones((1, self.size, units_of(parts)), dtype=bool)
        for bucket, missed in lost.items():
            arrived[0][:, parts[bucket].numbers] = ~missed
        exchange, receivers = Exchange("param", self.stream, step), members[self.rank : self.rank + 1]
        delivery = Delivery(exchange, members, receivers, arrived, parts)
        self._made_last.put(exchange, delivery)
        self.transport.restore(delivery)

    def told(self) -> list[Told]:
        """What became of what this rank sent in the latest step that is over, bucket by bucket."""
        return [told for _, told in sorted(self._told.items(), key=lambda one: one[0])]

    # --- steps ---------------------------------------------------------------------------------------------------

    def prepare(self, step: int, following: int | None = None) -> None:
        """The exchanges of ``step`` come next, and after them those of ``following``, if that is known."""
        for phase in PHASES:
            self.transport.prepare(Exchange(phase, self.stream, step))
        steps = self.transport.steps("grad")
        if following is not None and (steps is None or following < steps) and self.rules["grad"][0].foresight:
            self.transport.prepare(Exchange("grad", self.stream, following))

    def _ask_for_late_reports(self, bucket: int, seconds: float = 0.0) -> None:
        rule = self.rules["grad"][bucket]
        for step in list(rule.late):
            rule.reported(step, self.transport.reports(Exchange("grad", self.stream, step), bucket, seconds))

    def keep_lost(self, bucket: int, step: int) -> None:
        """The exchange of ``step`` is over, and its gradients may be overwritten: keep what others say that they lack."""
        self._ask_for_report(bucket, step, _PATIENCE)

    def _ask_for_report(self, bucket: int, step: int, seconds: float) -> None:
        rule = self.rules["grad"][bucket]
        if rule.at_sender and rule.sent_in(step):
            rule.reported(step, self.transport.reports(Exchange("grad", self.stream, step), bucket, seconds))

    def _begin_step(self, bucket: int, step: int) -> None:
        self._count_before(bucket, step)
        self._open[bucket] = step

    def _count_before(self, bucket: int, step: float) -> None:
        """If nobody has said how the latest step of ``bucket`` ended, and it is before ``step``, it counts."""
        before = self._open.get(bucket)
        if before is None or before >= step:
            return
        del self._open[bucket]
        self._ask_for_report(bucket, before, 0.0)
        rule = self.rules["grad"][bucket]
        if rule.priority is not None:
            self._told[bucket] = rule.priority.take_told()
        rule.finish_step(before, True)

    def _count_all(self) -> None:
        for bucket in list(self._open):
            self._count_before(bucket, math.inf)

    def finish_step(self, step: int, successful: bool) -> None:
        """Tell the recovery rules whether the optimizer used the gradients of ``step``."""
        until = time.monotonic() + _PATIENCE
        for bucket in range(len(self.rules["grad"])):
            self._count_before(bucket, step)
            self._open.pop(bucket, None)
            self._ask_for_report(bucket, step, max(until - time.monotonic(), 0.0))
        rules = enumerate(self.rules["grad"])
        self._told = {bucket: rule.priority.take_told() for bucket, rule in rules if rule.priority is not None}
        for phase in self.rules.values():
            for rule in phase:
                rule.finish_step(step, successful)

    def close(self) -> None:
        """There are no more exchanges."""
        self._count_all()
        self.transport.close()

    def restart(self) -> None:
        """All replicas are equal, and begin as those of a checkpoint that was loaded."""
        self._made_last = Latest()
        self._open = {}
        for rules in self.rules.values():
            for rule in rules:
                rule.restart()

    def state_dict(self) -> dict[str, list[Any]]:
        """The states of the rules, by phase, and what was counted. The latest step counts, if nobody has said otherwise."""
        self._count_all()
        for bucket in range(len(self.rules["grad"])):
            self._ask_for_late_reports(bucket, math.inf)
        counted = {} if self.counted is None else {"counted": [self.counted.state_dict()]}
        return {phase: [rule.state_dict() for rule in rules] for phase, rules in self.rules.items()} | counted

    def load_state_dict(self, state: dict[str, list[Any]], device: torch.device) -> None:
        """Restore :meth:`state_dict`, with tensors on ``device``."""
        self._open = {}
        state = dict(state)
        if self.counted is not None and (counted := state.pop("counted", None)):
            self.counted.load_state_dict(*counted)
        for phase, saved in state.items():
            for rule, one in zip(self.rules[phase], saved, strict=True):
                rule.load_state_dict(one, device)
