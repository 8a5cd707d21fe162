"""``verify`` of the log of messages between pipeline stages: drawn losses are drawn again."""

from __future__ import annotations

import numpy as np

from ...base.exchange import Stream
from ...config import LossyConfig
from ...delivery_log import schema
from ...delivery_log.reader import BadLog, DeliveryLogFolder
from ...delivery_log.verdict import Verdict, check_files, check_source, config_of
from .flags import BOUNDARY_PHASES
from .log import BoundaryFile, Crossings, boundary_files
from .loss import Boundary
from .messages import Messages


def verify_boundaries(folder: DeliveryLogFolder, verdict: Verdict) -> None:
    """Read all records of boundaries in ``folder``; check numbers, draws, gaps and missing directions."""
    seen: set[tuple[str, str]] = set()
    for rank, files in boundary_files(folder.path).items():
        good = check_files(rank, files, lambda file: _check_file(file, folder, seen), "records of boundaries", verdict)
        verdict.narrow(rank, good)
    verdict.problems += _missing_phases(folder, seen)


def _check_file(file: BoundaryFile, folder: DeliveryLogFolder, seen: set[tuple[str, str]]) -> int:
    check_source(file, file.config, file.note["rank"], folder)
    count = 0
    for these in file.crossings():
        _check_crossings(file, these)
        seen.add((these.phase, these.stream))
        count += len(these.message)
    return count


def _missing_phases(folder: DeliveryLogFolder, seen: set[tuple[str, str]]) -> list[str]:
    """Boundaries with records of only one of two lossy directions: each direction has a rank of its own."""
    config = config_of(folder)
    if not seen or config is None:
        return []
    lossy = [phase for phase in BOUNDARY_PHASES if config.act_transport == "udp" or config.boundary_rate(phase)]
    return [
        f"no records of {phase} of {stream}"
        for stream in sorted({stream for _, stream in seen})
        for phase in lossy
        if (phase, stream) not in seen
    ]


def _check_crossings(file: BoundaryFile, these: Crossings) -> None:
    """Raise :class:`BadLog` unless the numbers of ``these`` agree, and drawn losses equal a new draw."""

    def bad(reason: object) -> BadLog:
        return file.bad(these.iteration, f"{these.phase} of {these.stream}: {reason}")

    if not file.first <= these.iteration <= file.last:
        raise file.bad(file.first, f"has records of iteration {these.iteration}")
    if these.phase not in BOUNDARY_PHASES:
        raise bad("is no phase of a boundary")
    boundary, config = file.boundary(these.stream), file.config
    # The numbers go on by one, or begin anew with a schedule that was run again.
    follows = np.append(-1, these.message[:-1]) + 1
    if ((these.message != follows) & (these.message != 0)).any():
        raise bad("a message is missing")
    residual = these.lost - these.repaired
    zeros = np.where(these.again, 0, residual)
    # Tensor-parallel copies have the zeros of all of them.
    observed = config.act_transport == "udp"
    wrong = (
        (these.zeros < zeros) if observed and Stream.parse(these.stream).tensor is not None else these.zeros != zeros
    )
    if (wrong | (residual < 0) | (these.lost > these.packets) | (these.zeros > these.packets)).any():
        raise bad("its numbers do not agree")
    for number, packets, count, bitmap in zip(these.message, these.packets, these.zeros, these.bitmaps):
        if bitmap is not None:
            packed = np.frombuffer(bitmap, dtype=np.uint8)[None]
            if packed.shape[1] != -(-packets // 8) or (~schema.unpack(packed, packets)).sum() != count:
                raise bad(f"message {number}: bitmap and zeros do not agree")
    if not observed and not _drawn_again(config, boundary, these):
        raise bad("what is drawn again from the recorded seed is not what was recorded")


def _drawn_again(config: LossyConfig, boundary: Boundary, these: Crossings) -> bool:
    """Whether the losses of ``these`` are those of the seed and the flags."""
    messages, stream = Messages(config), Stream.parse(these.stream)
    for number, packets, lost, repaired, again, zeros, bitmap in zip(
        these.message, these.packets, these.lost, these.repaired, these.again, these.zeros, these.bitmaps
    ):
        if number == 0:
            messages.begin(these.iteration, len(these.message))
        fate = messages.next(
            these.phase, boundary, stream.expert_rank, stream.tensor or 0, these.iteration, int(packets)
        )
        recorded = (lost, lost - repaired, again, zeros)
        if recorded != (fate.raw, fate.residual, fate.again, fate.lost.sum()):
            return False
        if bitmap is not None and bitmap != schema.pack(~fate.lost[None])[0].tobytes():
            return False
    return True
