"""Counts of the work of a real device between two moments, from a trace of ``torch.profiler`` (Chrome's format)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .rows import STEPS

#: Calls of CUDA's runtime in which the host waits. A copy that is not asynchronous ends in the first.
_WAITS = frozenset({"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"})


@dataclass(frozen=True)
class Measured:
    """Per step: ``kernels``, ``synchronisations``, ``pageable`` copies, and bytes ``to_device`` and ``from_device``."""

    kernels: float = 0.0
    synchronisations: float = 0.0
    pageable: float = 0.0
    to_device: float = 0.0
    from_device: float = 0.0

    def beyond(self, unhooked: Measured) -> Measured:
        """Return the difference to the unhooked step."""
        return Measured(**{name: value - getattr(unhooked, name) for name, value in asdict(self).items()})


def counted(events: Iterable[Mapping[str, Any]]) -> Measured:
    """Return the events of a trace of :data:`~.rows.STEPS` steps, without kernels of collectives: NCCL's choice."""
    found = dict.fromkeys(asdict(Measured()), 0.0)
    for event in events:
        kind, name, more = event.get("cat"), str(event.get("name", "")), event.get("args", {})
        if kind == "kernel":
            found["kernels"] += not name.startswith("nccl")
        elif kind == "cuda_runtime":
            found["synchronisations"] += name in _WAITS
        elif kind == "gpu_memcpy":
            found["pageable"] += "Pageable" in name
            for direction, key in (("HtoD", "to_device"), ("DtoH", "from_device")):
                found[key] += more.get("bytes", 0) if direction in name else 0
    return Measured(**{name: value / STEPS for name, value in found.items()})
