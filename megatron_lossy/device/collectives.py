"""The collectives that torch 2.13 renamed, by their new names. The old names give warnings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

#: ``(output, input, op=, group=, async_op=)``
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
#: ``(output, input, group=, async_op=)``
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
