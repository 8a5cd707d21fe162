"""``doctor --calibrate``: rows of the matrix on real CUDA devices, compared with the pretended one."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ...base.device import ranks_share_devices
from ...base.errors import refuse
from ..doctor.found import Finding, devices
from ..doctor.step import error_of_a_rank, torchrun
from .budget import ASIDE, Cost, read
from .rows import FEW, VIRTUAL, Row, rows
from .trace import Measured

#: Mean losses that differ by less are the same: kernels of a GPU round otherwise, and Adam makes whole steps of it.
_LOSS = 0.02


def calibrate() -> list[Finding]:
    """Return a finding for each of the few rows, which is printed to stderr as soon as it is there.

    Where there is one device, and NCCL does not let ranks share it, these are the rows of one rank. Several rows run at once.
    Raise :class:`UsageError` where there is no CUDA device.
    """
    kind, count, _ = devices()
    if kind != "cuda":
        raise refuse("--calibrate", f"on {kind}", "needs a CUDA device")
    budget, shared = read(), ranks_share_devices()
    names = [name for name in (*FEW, *VIRTUAL) if shared or rows()[name].ranks <= count]
    few = Finding("calibration", "rows of two ranks", "absent", "need two devices, or NCCL_MULTI_RANK_GPU_ENABLE=1")
    found = [] if shared or count > 1 else [few]
    runs: dict[str, Future[tuple[float, Measured]]] = {}  # several rows have the same unhooked step
    pool = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4))
    for name in names:
        for argument, row in ((name, rows()[name]), (f"{name}/unhooked", rows()[name].unhooked)):
            if row.name not in runs:
                runs[row.name] = pool.submit(_measure, argument, row)
    for name in names:
        try:
            loss, here = runs[name].result()
            _, unhooked = runs[rows()[name].unhooked.name].result()
            one = compared(name, loss, here.beyond(unhooked), budget.losses[name], budget.rows[name])
        except (RuntimeError, OSError) as error:
            one = Finding("calibration", name, "problem", f"failed: {error}")
        print(f"{one.status}: {name}: {one.text}", file=sys.stderr, flush=True)
        found.append(one)
    return found


def compared(name: str, loss: float, here: Measured, expected: float, allowed: Cost) -> Finding:
    """Compare a row on this device (``loss``, ``here``) with its line of the budget (``expected``, ``allowed``)."""
    waits = sum(allowed.synchronisations.values()) + sum(allowed.blocking.values()) + sum(allowed.pageable.values())
    apart = sum(n for place, n in allowed.synchronisations.items() if place.endswith(ASIDE))
    pairs = (
        ("synchronisations", here.synchronisations, waits),
        ("pageable copies", here.pageable, sum(allowed.pageable.values())),
        ("kernels", here.kernels, allowed.kernels),
        ("bytes to the device", here.to_device, allowed.to_device),
        ("bytes from the device", here.from_device, allowed.from_device),
    )
    text = ", ".join(f"{what} {number:.0f} (pretended: {limit:.0f})" for what, number, limit in pairs)
    text = f"loss {loss:.4f} (CPU: {expected:.4f}); a step beyond the unhooked: {text}"
    if abs(loss - expected) > _LOSS * expected:
        return Finding("calibration", name, "problem", text)
    # Kernels are printed, not judged: an operator may be several kernels here. A thread aside waits at each look.
    more = here.synchronisations > waits + apart + 0.5 or here.pageable > pairs[1][2] + 0.5
    return Finding("calibration", name, "warning" if more else "ok", text)


def _measure(name: str, row: Row) -> tuple[float, Measured]:
    """Return the loss and the counts of a run. Raise ``RuntimeError`` with its first error if it fails."""
    from .job import write_data

    with tempfile.TemporaryDirectory() as folder:
        write_data(folder)
        arguments = ["megatron_lossy.lab.calibration", name, folder]
        done = torchrun(row.ranks, arguments, (), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, folder)
        if done.returncode:
            raise RuntimeError(error_of_a_rank(done.stderr) or "no reason given")
        result = json.loads(Path(folder, "result.json").read_text())
    return result["loss"], Measured(**result["measured"])
