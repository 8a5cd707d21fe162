"""Page-locked memory between a device and the network; and the patience with a rank that lives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ...device import current_device
from ...exchange import Delivery
from ...recovery import Stale


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device for tensors of ``group``'s collectives."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else current_device()


def patience_of(group: dist.ProcessGroup | None) -> float:
    """Seconds that a collective of ``group`` would wait for a rank."""
    group = group or dist.group.WORLD
    options = getattr(group._get_backend(device_of(group)), "options", None)
    return getattr(options, "_timeout", default_pg_timeout).total_seconds()


def staged(buffer: torch.Tensor) -> bool:
    """Whether the engine, which is on the CPU, cannot read and write ``buffer`` in place."""
    return buffer.device.type != "cpu"


class Stage:
    """Page-locked memory between a device and the network: a copy of the sent data, and room for arriving data."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor) -> None:
        cuda = sent.device.type == "cuda"
        self.out = torch.empty(sent.shape, dtype=sent.dtype, pin_memory=cuda)
        self.back = torch.empty(received.shape, dtype=received.dtype, pin_memory=cuda)
        self._copied: torch.cuda.Event | None = None
        self._device = sent.device
        if not cuda:
            self.out.copy_(sent)
            return
        side = torch.cuda.Stream(sent.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.out.copy_(sent, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(side)
        sent.record_stream(side)

    def ready(self) -> None:
        """Wait, on any thread, until the sent data is there."""
        if self._copied is not None:
            # Else a thread's first call makes a context on device 0, whatever the process uses.
            torch.cuda.set_device(self._device)
            self._copied.synchronize()

    @staticmethod
    def bring(rows: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]) -> None:
        """Copy whole pieces to the device."""
        for row, values in zip(rows, staged, strict=True):
            row.copy_(values, non_blocking=True)

    def write(self, buffer: torch.Tensor, rule: Stale, delivery: Delivery, sources: Sequence[int]) -> None:
        """Copy the units that arrived from ``sources`` into the replica on the device, and nothing else."""
        rows, staged = (whole.chunk(len(delivery.sources)) for whole in (buffer, self.back))
        stale = rule.put_aside(buffer, delivery)
        self.bring([rows[source] for source in sources], [staged[source] for source in sources])
        rule.put_back(buffer, delivery, stale)
