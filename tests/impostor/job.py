"""One row of the matrix on the pretended device: on a rank, and from the process that starts the ranks."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections import Counter, defaultdict

from megatron_lossy.doctor.calibration.budget import Usage, most
from megatron_lossy.doctor.calibration.rows import FIRST, LAST, Row
from megatron_lossy.doctor.calibration.steps import run_row, write_data
from tests.ranks import RankFailed, free_port, run_ranks

from .tracker import Findings, Tracker

#: What the counted iterations are called in :class:`~tests.impostor.tracker.Count`.
STEADY = "steady"
STEPS = LAST - FIRST + 1
#: Rows that share processes.
_TOGETHER = 12
_STALLS = {
    "synchronisation": "synchronisations",
    "blocking copy": "blocking copies",
    "pageable copy": "pageable copies",
}


def on_rank(rank: int, row: Row, data: str, devices: int | None) -> tuple[Findings, float]:
    """Train a row; returns what its rank did on the device, and the last loss. ``devices``: None trains on the CPU."""
    from . import device

    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    tracker = Tracker()
    if devices is not None:
        if devices == 1:
            os.environ["LOCAL_RANK"] = "0"
        device.install(tracker, devices)

    def phase(name: str) -> None:
        tracker.phase = name

    loss = run_row(row, data, lambda: phase(STEADY), lambda: phase("end"))
    return tracker.findings(), loss


@functools.cache
def data() -> str:
    """The prefix of the data that all rows of this process train on."""
    folder = tempfile.TemporaryDirectory()
    data.folder = folder  # type: ignore[attr-defined]  # it lasts as long
    prefix = os.path.join(folder.name, "numbers")
    run_ranks(_write, 1, folder.name)
    return prefix


def _write(rank: int, folder: str) -> None:
    write_data(folder)


def several_on_rank(
    rank: int, rows: list[Row], ports: list[int], data: str, devices: int | None
) -> list[tuple[Findings, float]]:
    """One row after the other in this process, each with a store of its own: none finds what others left in it."""
    found = []
    for row, port in zip(rows, ports):
        os.environ["MASTER_PORT"] = str(port)
        found.append(on_rank(rank, row, data, devices))
    return found


def run(row: Row, devices: int | None = 1, timeout: float = 120) -> list[tuple[Findings, float]]:
    """Findings and losses of all ranks."""
    return run_ranks(on_rank, row.ranks, row, data(), devices, timeout=timeout, grouped=False)


def run_several(rows: list[Row]) -> dict[str, list[tuple[Findings, float]]]:
    """:func:`run` for many rows, in processes that they share: starting ranks takes most of the time of a row.

    Where they fail, each runs in processes of its own, and those that fail there are not in the result.
    """
    found: dict[str, list[tuple[Findings, float]]] = {}
    for size in sorted({row.ranks for row in rows}):
        of_size = [row for row in rows if row.ranks == size]
        for first in range(0, len(of_size), _TOGETHER):
            some = of_size[first : first + _TOGETHER]
            try:
                ports = [free_port() for _ in some]
                got = run_ranks(several_on_rank, size, some, ports, data(), 1, timeout=60 * len(some), grouped=False)
                found |= {row.name: [rank[k] for rank in got] for k, row in enumerate(some)}
            except RankFailed:
                for row in some:
                    with contextlib.suppress(RankFailed):
                        found[row.name] = run(row)
    return found


def usage(findings: Findings, loss: float | None = None) -> Usage:
    """What the counted iterations asked of the device, per step."""
    kernels, stalls, moved = 0, defaultdict(float), Counter()
    for count, times in findings.counts.items():
        if count.phase != STEADY:
            continue
        if count.kind == "kernel":
            kernels += times
        elif count.kind in _STALLS:
            kind = _STALLS[count.kind] + " aside" * count.place.aside
            stalls[count.place.name, kind] += times / STEPS
        moved[count.what] += findings.bytes[count]
    to_device, from_device = moved["to the device"] / STEPS, moved["from the device"] / STEPS
    return Usage(kernels / STEPS, to_device, from_device, dict(stalls), loss)


@functools.cache
def _unhooked(row: Row) -> list[Usage]:
    return [usage(findings) for findings, _ in run(row)]


class _Key(Row):
    """A row that can be a key: its name says all of it."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Row) and self.name == other.name


def beyond_unhooked(row: Row, got: list[tuple[Findings, float]]) -> Usage:
    """The most that a rank of ``row`` asked for in a step, beyond what it asks for in the unhooked step."""
    plain = row.unhooked
    base = _unhooked(_Key(plain.name, plain.trainer, plain.lossy, plain.ranks))
    return most([usage(findings, loss).beyond(base[rank]) for rank, (findings, loss) in enumerate(got)])
