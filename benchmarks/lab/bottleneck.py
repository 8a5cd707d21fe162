"""A bottleneck and the flows that share it, as a packet model in C (``bottleneck.c``) with the engine's own rate control.

It takes the time of the machine, not of the network: 20 seconds of 100 Mbit/s are computed in 0.1 s.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_lossy.base import native
from megatron_lossy.transport.udp.library import RULES

#: Rules of rates: ours, and those of other flows.
KINDS = {**RULES, "cubic": 3, "reno": 4}
#: Bytes of a packet.
PACKET = 1500
_STEPS, _GROUPS = 8, 64


class _Flow(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("as_flows", ctypes.c_int32),
        *(
            (name, ctypes.c_double)
            for name in ["begin", "end", "least", "most", "pause_least", "pause_most", "ceiling"]
        ),
    ]


class _Counts(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ["sent", "delivered", "overflowed", "lost"]),
        ("rate", ctypes.c_double),
        ("credit", ctypes.c_double),
    ]


class _Step(ctypes.Structure):
    _fields_ = [(name, ctypes.c_double) for name in ("at", "rate", "rtt")]


class _Setting(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_double)
            for name in [
                "rate",
                "rtt",
                "queue",
                "loss",
                "burst",
                "jitter",
                "skew",
                "sleep",
                "seconds",
                "warm",
                "interval",
            ]
        ),
        ("seed", ctypes.c_uint64),
        ("flows", ctypes.c_int32),
        ("steps", ctypes.c_int32),
        ("step", _Step * _STEPS),
    ]


@dataclass(frozen=True)
class Bottleneck:
    """A path: ``mbit`` Mbit/s behind a queue of ``queue`` ms, a round trip of ``rtt`` ms, and loss of its own.

    ``burst``: mean packets lost in a row, 0 for single ones. ``jitter``: ms, the most that a packet is late. ``skew``: ms,
    the most between the clocks of two senders. ``sleep``: ms, the mean of the times in which a process of ours does not run, a sixth of
    all. ``steps``: what the path becomes at a time: seconds, Mbit/s, ms.
    """

    mbit: float = 100
    rtt: float = 20
    queue: float = 2
    loss: float = 0.0
    burst: float = 0.0
    jitter: float = 0.0
    skew: float = 10.0
    sleep: float = 0.0
    steps: tuple[tuple[float, float, float], ...] = ()


@dataclass(frozen=True)
class Flow:
    """A flow of a kind of :data:`KINDS`: exchanges of 4 to 40 MB with pauses of 10 to 300 ms, or without end.

    ``group``: the process that receives it, which reports to its flows what each has; ``None``: it does not. ``as_flows``: TCP
    flows that a flow of ``shared`` is fair as.
    """

    kind: str = "shared"
    endless: bool = False
    group: int | None = None
    begin: float = 0.0
    as_flows: int = 1

    def _packed(self) -> _Flow:
        endless = self.endless or KINDS[self.kind] > RULES["shared"]
        sizes = (0.0, 0.0) if endless else (4e6, 40e6)
        group = -1 if self.group is None else self.group % _GROUPS
        return _Flow(KINDS[self.kind], group, self.as_flows, self.begin, 1e6, *sizes, 0.01, 0.3, 1.25e9)


@dataclass(frozen=True)
class Outcome:
    """Results of each flow, in packets after the warm-up, and of the link.

    ``used``: share of its capacity while any flow had data to send. ``trace`` [interval, flow, 2]: bytes
    that arrived, and that did not fit the queue, from the beginning.
    """

    sent: np.ndarray
    delivered: np.ndarray
    overflowed: np.ndarray
    credit: np.ndarray
    used: float
    trace: np.ndarray

    def own_loss(self, flows: slice = slice(None)) -> float:
        """Return the share of ``flows``' packets that did not fit the queue."""
        return float(self.overflowed[flows].sum() / max(self.sent[flows].sum(), 1))


@functools.cache
def _library() -> ctypes.CDLL:
    compiler = native.compiler()
    if compiler is None:
        raise RuntimeError("the packet model needs a C compiler")
    with tempfile.TemporaryDirectory(prefix="megatron-lossy-bottleneck-") as folder:
        path = Path(folder, "bottleneck.so")
        flags = [flag for flag in native.FLAGS if flag not in ("-Wall", "-Wextra")]
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, *flags, "-o", path, source, "-lm"], check=True)
        return ctypes.CDLL(str(path))


def run(
    path: Bottleneck,
    flows: Sequence[Flow],
    *,
    seconds: float = 12,
    warm: float = 3,
    seed: int = 1,
    interval: float = 0.1,
) -> Outcome:
    """Let ``flows`` share ``path`` for so many seconds of its time; what happens before ``warm`` is not counted."""
    setting = _Setting(
        rate=path.mbit * 1e6 / 8,
        rtt=path.rtt / 1e3,
        queue=path.queue / 1e3,
        loss=path.loss,
        burst=path.burst,
        jitter=path.jitter / 1e3,
        skew=path.skew / 1e3,
        sleep=path.sleep / 1e3,
        seconds=seconds,
        warm=warm,
        interval=interval,
        seed=seed,
        flows=len(flows),
        steps=len(path.steps),
    )
    for index, (at, mbit, rtt) in enumerate(path.steps):
        setting.step[index] = _Step(at, mbit * 1e6 / 8, rtt / 1e3)
    counts, used = (_Counts * len(flows))(), (ctypes.c_double * 2)()
    trace = np.zeros((round(seconds / interval), len(flows), 2))
    packed = (_Flow * len(flows))(*(flow._packed() for flow in flows))
    _library().bottleneck_run(
        ctypes.byref(setting), packed, counts, used, trace.ctypes.data_as(ctypes.c_void_p), len(trace)
    )
    columns = {
        name: np.array([getattr(flow, name) for flow in counts])
        for name in ("sent", "delivered", "overflowed", "credit")
    }
    return Outcome(**columns, used=used[0] / max(used[1], 1.0), trace=trace)
