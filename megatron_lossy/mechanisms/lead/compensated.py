"""``compensated``: an owner sends its weights with a lead, so that the mean replica has the owner's weights.

The owner sends V(t) = W(t) + E(t), with E(t) = c (W(t) - W(t-1)) + r E(t-1) (:mod:`megatron_lossy.base.theory`). It
computes, evaluates and saves with W. E is 0 in the beginning, and after a step in which nothing can be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...base.exchange import BucketUnits, Delivery
from ...recovery.base import Parameters, Stale
from ...recovery.rows import used_here
from .lag import Lag


class Compensated(Stale):
    """Treats received units as :class:`Stale` does, and puts the lead on the own shard while it is sent.

    ``lag``: the lag of receivers; the rules of all buckets of a group share it. ``weights``: the caller may set this
    function; it returns the own shard as the optimizer has it, float32 [shard]. Without it the weights are the values
    that are sent, in their own dtype.
    """

    name = "compensated"
    exact = False

    def __init__(self, units: BucketUnits, rank: int, lag: Lag) -> None:
        super().__init__(units, rank)
        self.lag = lag
        self.shared = {} if lag.counted is None else {"counted": lag.counted}
        self.weights: Callable[[], torch.Tensor] | None = None
        # Two float32 [shard] that take turns, so that no step allocates any.
        self._before: torch.Tensor | None = None  # W of the last update; free for other use once the next one is sent
        self._lead: torch.Tensor | None = None  # E
        self._updated = self._leads = False  # whether the two tensors hold these values
        self._step: int | None = None  # the update that the lead belongs to

    def _own(self, sent: torch.Tensor) -> torch.Tensor:
        return sent.detach().float() if self.weights is None else self.weights()

    def before_update(self, sent: torch.Tensor) -> None:
        self.keep(self._own(sent))
        if self.lag.counted is not None:
            self.lag.counted.use_own()

    def keep(self, weights: torch.Tensor) -> None:
        """Keep ``weights`` float32 [shard], those of the own shard before their update."""
        if self._before is None:
            self._before = weights.clone()
        else:
            self._before.copy_(weights)
        self._updated = True

    def send(self, x: Parameters) -> torch.Tensor | None:
        weights = self._own(x.sent)
        lead = self._lead_of(x.exchange.step, weights)
        if lead is None:
            return None
        free = self._before if not self._updated else None
        own = x.sent.clone() if free is None or free.dtype != x.sent.dtype else free.copy_(x.sent)
        torch.add(weights, lead, out=x.sent)
        return own

    def put_lead(self, step: int, sent: torch.Tensor) -> None:
        """Add the lead of ``step`` to ``sent`` [shard], the owner's weights; the same lead if they are sent again."""
        weights = self._own(sent)
        ahead = self._lead_of(step, weights)
        if ahead is not None:
            torch.add(weights, ahead, out=sent)

    def _lead_of(self, step: int, weights: torch.Tensor) -> torch.Tensor | None:
        if step != self._step:
            self._step = step
            c, r = self.lag.lead(step)
            if not c or not self._updated:
                self._leads = False
            else:
                assert self._before is not None
                difference = self._before.sub_(weights).mul_(-c)
                if self._leads and r:
                    assert self._lead is not None
                    difference.add_(self._lead, alpha=r)
                self._before, self._lead, self._leads = self._lead, difference, True
            self._updated = False
        return self._lead if self._leads else None

    def sent(self, x: Parameters, own: torch.Tensor | None, delivery: Delivery) -> None:
        if self.lag.counted is not None:
            self.lag.counted.count(x.bucket, self.units, delivery)
        if own is None:
            return
        used_here((own,))
        x.sent.copy_(own)
        mine = x.buffer[self.rank * self.units.shard : (self.rank + 1) * self.units.shard]
        if mine.data_ptr() != x.sent.data_ptr():
            mine.copy_(own)

    def restart(self) -> None:
        super().restart()
        self._updated = self._leads = False
        self._step = None

    def state_dict(self) -> dict[str, Any]:
        lead = self._lead.clone() if self._leads and self._lead is not None else None
        # Loops on the public collectives announce the next update right after an exchange.
        before = self._before.clone() if self._updated and self._before is not None else None
        return {"lead": lead, "before": before, "step": self._step}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        lead, before = state["lead"], state["before"]
        self._lead = None if lead is None else lead.to(device, copy=True)
        self._before = None if before is None else before.to(device, copy=True)
        self._leads, self._updated = lead is not None, before is not None
        self._step = state["step"]
