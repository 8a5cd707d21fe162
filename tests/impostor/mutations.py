"""Slips in the product that the device must notice: each is made in a rank, on purpose, by a test that expects a fault."""

from __future__ import annotations

from typing import Any


def no_wait() -> None:
    """Nobody waits for a collective."""
    from megatron_lossy.transport.base import Transfer

    Transfer.wait = lambda self: self.complete()


def recovery_first() -> None:
    """Recovery is applied before the collective has ended."""
    from megatron_lossy.transport.base import Transfer

    def wait(self: Any) -> Any:
        work = self.work
        result = self.complete()
        if work is not None:
            work.wait()
        return result

    Transfer.wait = wait


def no_announcement() -> None:
    """No ``record_stream``."""
    import torch

    torch.Tensor.record_stream = lambda self, stream: None


def pageable_copy() -> None:
    """Copies to the device begin in memory that is not page-locked."""
    import torch

    empty = torch.empty
    torch.empty = lambda *sizes, pin_memory=False, **known: empty(*sizes, **known)


def index_on_the_host() -> None:
    """An index stays on the host, and torch brings it to the device each time."""
    import numpy as np
    import torch

    from megatron_lossy.recovery import rows

    to_device = rows.to_device

    def staying(values: Any, device: Any = "cpu") -> Any:
        return torch.from_numpy(values) if getattr(values, "dtype", None) == np.int32 else to_device(values, device)

    rows.to_device = staying


def reads_a_value() -> None:
    """A factor is read on the host."""
    from megatron_lossy.recovery import rows

    scale = rows.IndexedRows.scale_

    def reading(shard: Any, units: Any, factors: Any) -> Any:
        shard[0].item()
        return scale(shard, units, factors)

    rows.IndexedRows.scale_ = staticmethod(reading)


def stage_not_ready() -> None:
    """Bytes of the device leave before they have come to the host."""
    from megatron_lossy.transport import staging

    staging.Stage.ready = lambda self, *_: None


def rows_by_index() -> None:
    """On Gaudi, too, only what was lost is touched: shapes follow the loss."""
    from megatron_lossy.recovery import base, rows

    base.rows_for = rows.rows_for = lambda *_: rows.IndexedRows


#: Those that change what a device does.
_ALL = (no_wait, recovery_first, no_announcement, pageable_copy, index_on_the_host, reads_a_value, stage_not_ready)
MUTATIONS = {one.__name__: one for one in _ALL}
