"""``stale``: a unit of parameters that is lost keeps the value that the worker received last (paper, section 3 (4))."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..exchange import Delivery, Lost
from .base import Reduction, Rule
from .priority import ParamPriority
from .rows import Saved

if TYPE_CHECKING:
    import torch


class Stale(Rule):
    """Puts the units aside that the gather would overwrite, and puts them back. ``buffer``, ``output``: the replica."""

    name = "stale"
    #: Which units are delivered all the same; set by whoever knows the flags.
    priority: ParamPriority | None = None

    def before(
        self, buffer: torch.Tensor, delivery: Delivery | None, reduction: Reduction
    ) -> tuple[Lost, Saved] | None:
        if delivery is None:
            return None
        lost, rows = self.lost(delivery), self.rows(buffer)
        return None if rows.nothing(lost) else (lost, rows.take(buffer, self.units, lost))

    def after(
        self,
        output: torch.Tensor,
        delivery: Delivery,
        kept: tuple[Lost, Saved] | None,
        reduction: Reduction,
    ) -> None:
        if kept is not None:
            lost, saved = kept
            self.rows(output).put_(output, self.units, lost, saved)

    def lost(self, delivery: Delivery) -> Lost:
        """Units of the bucket that are stale after ``delivery``."""
        return delivery.lost_here(self.units)

    def restart(self) -> None:
        if self.priority is not None:
            self.priority.restart()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.priority is None else self.priority.state_dict()

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        if self.priority is not None:
            self.priority.load_state_dict(state, device)
