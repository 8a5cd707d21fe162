"""The rests of means: an owner keeps, for the next mean of the same element, what codes take from one.

With the rest r of an element, m = Q(mean + r) crosses, and r becomes mean + r - m. So the means of an element that crossed add up to
those before rounding, but for one rounding, however many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from .places import Places, read_at


class Rest:
    """The rests of the islands of this process, which are numbered from 0: float32[size] each, on the device that makes means."""

    def __init__(self) -> None:
        self._rows: dict[int, torch.Tensor] = {}

    def crossing(
        self,
        island: int,
        place: int,
        places: Places | None,
        count: int,
        mean: torch.Tensor,
        averaged: torch.Tensor | None,
        crosses: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """m [shard] of the ``mean`` [shard] that ``island`` owns in an exchange of ``count`` elements at ``places``.

        ``place``: the number of its shard. ``averaged`` bool[shard]: the elements that somebody sent; ``None``: all; the others are NaN.
        ``crosses``: makes Q(x) [shard] of x.
        """
        size = count if places is None else places.size
        row = self._rows.get(island)
        row = self._rows[island] = torch.zeros(size, device=mean.device) if row is None else row.to(mean.device)
        chosen = read_at(row, places)
        own = chosen[place * len(mean) : (place + 1) * len(mean)]  # the last shard may be shorter
        whole = mean.clone()
        whole[: len(own)] += own
        if averaged is not None:
            whole.masked_fill_(~averaged, torch.nan)
        crossed = crosses(whole)
        left = (whole - crossed)[: len(own)]
        own.copy_(torch.where(left.isfinite(), left, own))
        if places is not None:
            places.write(row, chosen)
        return crossed

    def forget(self, island: int) -> None:
        """``island`` begins again."""
        self._rows.pop(island, None)

    def state_dict(self) -> dict[int, torch.Tensor]:
        """The rests, by island."""
        return dict(self._rows)

    def load_state_dict(self, state: Mapping[int, torch.Tensor]) -> None:
        """Restore :meth:`state_dict`."""
        self._rows = {island: row.clone() for island, row in state.items()}
