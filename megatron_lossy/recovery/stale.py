"""``stale``: a lost unit of parameters keeps the value that the worker received last (paper, section 3 (4)).

Some wires overwrite the whole replica: with those the rule puts lost units aside and puts them back. Others write only
the units that arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..base.exchange import Delivery
from .base import Parameters, Rule
from .rows import Saved

if TYPE_CHECKING:
    import torch


class Stale(Rule):
    """Keeps the values received last."""

    name = "stale"
    #: Whether units that arrived hold their owners' weights.
    exact: bool = True

    def put_aside(self, replica: torch.Tensor, delivery: Delivery) -> Saved | None:
        """Copies of the units of ``replica`` [N * shard] that will be stale; ``None`` if there is nothing to do."""
        lost = delivery.lost_here(self.units)
        return None if self.rows.nothing(lost) else self.rows.take(replica, self.units, lost)

    def put_back(self, replica: torch.Tensor, delivery: Delivery, saved: Saved | None) -> None:
        """Write the units that :meth:`put_aside` returned back into ``replica``."""
        if saved is not None:
            self.rows.put_(replica, self.units, delivery.lost_here(self.units), saved)

    def send(self, x: Parameters) -> Any:
        """Put the values to send into ``x.sent``. The result is given to :meth:`sent`."""

    def sent(self, x: Parameters, own: Any, delivery: Delivery) -> None:
        """Put the owner's weights back into the own shard: the exchange is over, and ``delivery`` arrived here."""

    def before_update(self, sent: torch.Tensor) -> None:
        """Keep what the next exchange needs of ``sent`` [shard], the own shard. Loops of users say no more than this."""
