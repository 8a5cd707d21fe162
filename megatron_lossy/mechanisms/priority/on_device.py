"""The choice of units on an accelerator, where their values are, without a wait.

These functions choose what :mod:`.choosing` chooses with NumPy, of the same values, also of equal ones. Their shapes and
numbers depend on the cut of a bucket alone. They run on a CPU as well, so that both can be compared.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from ...recovery.rows import to_device


def keys(sizes: torch.Tensor, left_out: int | None) -> torch.Tensor:
    """Return ``sizes`` float32[N, count], none below 0; -1 for those that are not finite, -2 in row ``left_out``."""
    result = sizes.nan_to_num(nan=-1.0, posinf=-1.0)
    if left_out is not None:
        result[left_out].fill_(-2.0)
    return result


def choose_top_(chosen: torch.Tensor, keys: torch.Tensor, count: int) -> None:
    """Set the ``count`` largest of ``keys`` in ``chosen`` bool, both of one shape; of equal ones the first."""
    if count:
        chosen.view(-1).index_fill_(0, keys.flatten().argsort(descending=True, stable=True)[:count], True)


def quantile(values: torch.Tensor, share: float) -> torch.Tensor:
    """Return float32, without dimensions: ``np.quantile`` of finite ``values`` float32[k]; infinity without any."""
    finite = values.isfinite()
    ordered = values.masked_fill(~finite, torch.inf).sort().values
    count = finite.sum(dim=0, keepdim=True)
    low, high, weight, above = to_device(_mixes(len(values), share), values.device).index_select(1, count)
    low, high = ordered.index_select(0, low.long()), ordered.index_select(0, high.long())
    step = (high - low) * weight
    return torch.where(count > 0, torch.where(above > 0, high - step, low + step), torch.inf)[0]


@functools.lru_cache(maxsize=8)
def _mixes(most: int, share: float) -> np.ndarray:
    """Return float32[4, most + 1]: how to mix two of 0 to ``most`` ordered values, which depends on their number alone.

    By that number: the places of the two values around the quantile, its distance from one of them in units of theirs,
    and whether from the second. In float64, as NumPy works it out; not every device has float64.
    """
    last = np.maximum(np.arange(most + 1) - 1, 0)
    place = last * share
    low = np.floor(place)
    distance = place - low
    above = distance >= 0.5
    return np.stack([low, np.minimum(low + 1, last), np.where(above, 1 - distance, distance), above]).astype(np.float32)
