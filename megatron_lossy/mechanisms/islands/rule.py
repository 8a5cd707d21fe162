"""The base class of rules: a rule makes an island's payload, and applies the mean that comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from .places import Places


@dataclass(frozen=True)
class Back:
    """The result of one exchange for one island.

    ``sent``, ``mean`` float32[k]: the values that it sent, and the mean of all. ``arrived`` bool[k]: the elements whose
    mean is here; ``None``: all. ``places``: the places of these elements; ``None``: all of the vector. ``begun``: the
    iteration before the exchange; ``step``: the iteration that has just ended.
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

    #: Whether the rule acts at every exchange, also when no mean has come back yet.
    always: ClassVar[bool] = False
    #: Whether an island keeps its difference to the rounded values that it sent. Then owners may keep rounding's rest.
    keeps_rest: ClassVar[bool] = False

    def payload(self, island: int, now: torch.Tensor) -> torch.Tensor:
        """The values that ``island`` sends: [k] for its weights ``now`` [k]. It may be the same tensor."""
        return now

    def begin(self, step: int, places: Places | None) -> None:
        """Called when an exchange of the elements at ``places`` begins after iteration ``step``."""

    @abstractmethod
    def apply(self, island: int, now: torch.Tensor, back: Back) -> torch.Tensor:
        """The new weights float32[k] of ``island``, whose weights are ``now`` float32[k]."""

    def end(self, begun: int) -> None:
        """Called when the exchange that began after iteration ``begun`` has been used."""

    def restart(self, island: int) -> None:
        """``island`` was away, and begins again: forget it. Exchanges that began before are not used by it."""

    def copy(self, source: int, island: int) -> None:
        """``island`` has just taken the weights of ``source``: take the state that belongs to them."""

    def state_dict(self) -> dict[str, Any]:
        """The state that must be saved for a run to continue bit for bit."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
