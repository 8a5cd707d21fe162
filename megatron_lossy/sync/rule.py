"""What a rule is: what an island sends, and what it makes of the mean that comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .places import Places


@dataclass(frozen=True)
class Back:
    """What came back to an island of one exchange.

    ``sent``, ``mean`` float32[k]: what it sent, and the mean of all. ``arrived`` bool[k]: where the mean is here; ``None``:
    everywhere. ``places``: which elements these are; ``None``: all. ``begun``: the iteration after which it was sent; ``step``: the
    one that has just been made.
    """

    sent: torch.Tensor
    mean: torch.Tensor
    arrived: torch.Tensor | None
    places: Places | None
    begun: int
    step: int

    def where_arrived(self, there: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """``there`` where the mean arrived, and ``otherwise`` elsewhere."""
        return there if self.arrived is None else torch.where(self.arrived, there, otherwise)


class Rule(ABC):
    """One rule for one vector of the islands of this process. Islands are numbered from 0 within the process."""

    #: Whether something is done at every exchange, also when no mean has come back yet.
    always: ClassVar[bool] = False
    #: Whether an island keeps what it is off what it sent, so that what rounding takes from a mean can stay with its owner.
    keeps_rest: ClassVar[bool] = False

    def payload(self, island: int, now: torch.Tensor) -> torch.Tensor:
        """What ``island`` sends: [k] for its weights ``now`` [k]. It may be the same tensor."""
        return now

    def begin(self, step: int, places: Places | None) -> None:
        """An exchange begins after iteration ``step``, of the elements at ``places``."""

    @abstractmethod
    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        """The new weights float32[k] of ``island``, whose weights are ``now`` float32[k]."""

    def state_dict(self) -> dict[str, Any]:
        """What must be saved for a run to continue bit for bit."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
