"""Rules whose senders choose the units that have to arrive (``--grad-priority``, ``error-feedback``).

A network can recover some of its losses, by parity or by sending again. It does so for the units that matter most. Only
their sender can choose these. If losses are drawn, the sender removes the other lost units itself (:class:`SparingRule`). If
a network loses them, the sender names the units that must arrive (:class:`RequiringRule`). The rule inside has no part in
this.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...base.errors import refuse
from ...base.exchange import Delivery, Exchange, Lost
from ...base.fetch import PendingArray
from ...channel.draws import generator
from ...recovery.base import Gradients, GradRecovery, SentUnits, add_up
from ...run.monitor import Look, Observer, Window
from .choosing import SAMPLE, Priority, Protection

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...transport import Wire

logger = logging.getLogger(__name__)


class ProtectedRule(GradRecovery):
    """``rule`` with a ``priority`` that chooses the units that have to arrive."""

    #: bool[N, count]: the units of the latest exchange that must arrive, if a network loses them.
    must: PendingArray | None = None
    #: The record of the latest ended step.
    told: SentUnits | None = None

    def __init__(self, rule: GradRecovery, priority: Priority) -> None:
        super().__init__(rule.units, rule.rank)
        self.rule = rule
        #: The rule if it keeps its losses.
        self.feedback: Any = rule if rule.feeds_back else None
        self.priority = priority
        self.name = rule.name  # type: ignore[misc]
        self.foresight, self.carries_over, self.shared = rule.foresight, rule.carries_over, rule.shared

    def correct(self, buffer: torch.Tensor, x: Gradients) -> None:
        """Add what the rule kept of earlier steps to ``buffer`` [N * shard]."""
        if self.feedback is not None:
            self.feedback.correct(buffer, x)

    def after(self, shard: torch.Tensor, delivery: Delivery, kept: Any, x: Gradients) -> None:
        self.rule.after(shard, delivery, kept, x)

    @property
    def protected(self) -> ProtectedRule:
        """This rule: see :attr:`GradRecovery.protected`."""
        return self  # kept as an attribute, it would keep payloads until garbage is collected

    def _note(self, lost: Lost) -> None:
        if self.feedback is not None:
            self.feedback.note(self.priority.told, lost)

    def share(self, replicated: np.ndarray) -> None:
        """Let the units ``replicated`` bool[N, count], with copies at other ranks, always arrive: copies lose the same."""
        # A unit may hold other values than the copies, and these differ between ranks: a choice would differ too.
        self.priority.always = replicated

    def finish_step(self, step: int, successful: bool) -> None:
        self.told = self.priority.take_told()
        self.rule.finish_step(step, successful)

    def restart(self) -> None:
        self.rule.restart()

    def state_dict(self) -> dict[str, Any]:
        return self.rule.state_dict()

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        self.rule.load_state_dict(state, device)


class SparingRule(ProtectedRule):
    """The rule for drawn losses: chosen units arrive even if the draw loses them."""

    rounds = True
    _final: Lost | None = None

    def before(self, buffer: torch.Tensor, lost: Lost, delivery: Delivery, x: Gradients) -> Any:
        self.correct(buffer, x)
        final: Lost | None = self.priority.spare(buffer, lost, x.exchange)
        if not self.rule.minds_spared:
            final = self.priority.settle()
        if self.feedback is not None:
            kept = self.feedback.remove(buffer, final, delivery, x)
        else:
            if x.rounding is not None:
                x.rounding(buffer)
            kept = self.rule.before(buffer, final, delivery, x)
        if final.spared is None:
            self._note(final)
        self._final = final
        return kept

    @property
    def final(self) -> Lost | None:
        """The units of the latest exchange that were lost for good. It waits for the choice."""
        if self._final is not None and self._final.spared is not None:
            self._final = self.priority.settle()
            if self.feedback is not None:
                self.feedback.settle(self._final)
            self._note(self._final)
        return self._final

    def finish_step(self, step: int, successful: bool) -> None:
        _ = self.final
        super().finish_step(step, successful)

    def restart(self) -> None:
        super().restart()
        self._final = None

    def leave_out(self, delivery: Delivery, x: Gradients) -> Any:
        """Remove lost units at the sender although owners get pieces: only the sender has its priorities."""
        return self.before(x.buffer, delivery.lost_there(self.units), delivery, x)

    def combine(self, pieces: torch.Tensor, delivery: Delivery, kept: Any, x: Gradients) -> None:
        add_up(pieces, delivery, x)
        self.after(x.output, delivery, kept, x)


class RequiringRule(ProtectedRule):
    """The rule for losses of a network: chosen units must arrive; other losses are reported."""

    #: The units of the latest exchange that were lost for good, once they are reported.
    final: Lost | None = None

    def __init__(self, rule: GradRecovery, priority: Priority) -> None:
        super().__init__(rule, priority)
        #: The payload without a report yet: step, payload, loss scale.
        self._sent: tuple[int, torch.Tensor, Any] | None = None
        self._late: list[int] = []

    def choose(self, x: Gradients) -> PendingArray:
        """Return bool[N, count]: the units that must arrive, here or on their way."""
        self.correct(x.buffer, x)
        self.must = self.priority.choose(x.buffer, x.exchange)
        self._sent = (x.exchange.step, x.buffer, x.loss_scale())
        return self.must

    def combine(self, pieces: torch.Tensor, delivery: Delivery, kept: Any, x: Gradients) -> None:
        self.rows.zero_(pieces, self.units, delivery.lost_here(self.units))
        add_up(pieces, delivery, x)
        self.after(x.output, delivery, None, x)

    @property
    def late(self) -> list[int]:
        """Ended steps without a report yet of the units that arrived."""
        return list(self._late)

    def sent_in(self, step: int) -> bool:
        """Return whether units were sent in ``step`` and no report says yet which of them arrived."""
        return self._sent is not None and self._sent[0] == step

    def reported(self, step: int, lost: np.ndarray | None) -> None:
        """Take the report for ``step``: ``lost`` bool[N, count], units that did not arrive; ``None``: missing."""
        if self._sent is not None and self._sent[0] == step:
            _, payload, loss_scale = self._sent
            self._sent = None
            if lost is None:
                self._late.append(step)
                if self.feedback is not None:
                    self.feedback.keep_all(step, payload, loss_scale)
                return
            self.final = Lost(lost)
            self.priority.tell(self.final)
            if self.feedback is not None:
                self.feedback.keep(step, payload, self.final, loss_scale)
            self._note(self.final)
        elif lost is not None:
            self._late.remove(step)
            if self.feedback is not None:
                self.feedback.keep_late(step, Lost(lost))

    def restart(self) -> None:
        super().restart()
        self._sent, self._late = None, []


def protected_rules(config: LossyConfig, rules: Sequence[GradRecovery], wire: Wire) -> list[GradRecovery]:
    """Return ``rules`` for gradients on ``wire``, with the priorities that the flags ask for.

    Raise :class:`UsageError` for rules with a verb of their own that would not be called.
    """
    for rule in rules:
        if type(rule).combine is not GradRecovery.combine:
            why = f"--grad-recovery {rule.name} has its own combine(), which would not be called; omit --grad-priority"
            raise refuse("--grad-priority", config.grad_priority, why)
    if config.grad_priority == "none":
        _warn_of_no_priority(config)

    def draw(exchange: Exchange, source: int, number: int) -> np.ndarray:
        return generator(config.loss_seed, exchange, source, number).random(SAMPLE)

    protection = Protection(*config.grad_priority_rule, config.lossy_self, draw)
    kind = RequiringRule if wire.observed else SparingRule
    return [kind(rule, Priority(protection, rule.units, rule.rank)) for rule in rules]


@functools.cache
def _warn_of_no_priority(config: LossyConfig) -> None:
    logger.warning(
        "--grad-priority none with %s: large gradients that are lost come back at full size in a later step, which may have "
        "been clipped less; consider packet-mean (docs/smart.md)",
        config.grad_recovery,
    )


class PriorityMonitor(Observer):
    """Metrics of ``--grad-priority`` and ``error-feedback``, over all ranks.

    ``told()``: the records of the latest exchange, one for each bucket.
    """

    def __init__(self, told: Callable[[], Iterable[SentUnits]]) -> None:
        self._told = told
        self._window = Window(
            ["units", "high", "lost", "recovered", "left", "residual", "payload"],
            largest=["oldest"],
        )

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        for record in self._told():
            self._window.add(**vars(record))

    def metrics(self) -> dict[str, float]:
        total = self._window.close()
        if not total["units"]:
            return {}
        # Over a network the losses before repair are not known.
        recovered = {"recovered share": total["recovered"] / total["lost"]} if total["lost"] else {}
        return recovered | {
            "priority share": total["high"] / total["units"],
            "residual share": total["left"] / total["units"],
            "residual ratio": total["residual"] / total["payload"] if total["payload"] else 0.0,
            "oldest residual": max(total["oldest"], 0.0),
        }
