"""Replay of recorded deliveries.

A trace is an .npz file with the boolean arrays ``grad`` and ``param`` of shape [steps, N, N, units]: True where the
unit from source (second axis) to destination (third axis) arrived. Step 0 is the first iteration. An array named
``PHASE.STREAM`` (``grad.expert-e0-s0-c0``, see :attr:`Stream.name`) takes precedence for that stream. ``units`` is 1
for ``--loss-unit shard``, the number of buckets for ``bucket``, and the number of packets for ``packet``.

Or it has one array ``sequence``, bool[N, N, packets]: the fate of the packets that a link carried one after another, without end
in a circle. With N = 1 it is that of each link. ``python -m megatron_lossy.lab trace`` makes it of a measurement.
"""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..base.errors import UsageError, refuse
from ..base.exchange import Exchange, Stream
from ..config import RATES, LossyConfig, PhaseLoss
from .base import Channel

#: The name of the array of a circular trace.
SEQUENCE = "sequence"


class Trace(Channel):
    """Loses exactly the units that the recorded trace lost, whatever the seed."""

    name = "trace"
    redrawable = False  # it is in a file

    def __init__(self, loss: PhaseLoss, seed: int, together: bool = False) -> None:
        super().__init__(loss, seed, together)
        assert loss.trace is not None, "plan sets it"
        self.path = loss.trace
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                self.arrays = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:  # TypeError: of an .npy file
            raise self._wrong(
                f"must be a folder that --delivery-log wrote, or a readable .npz file ({error})"
            ) from None
        found = self._sequence = self.arrays.pop(SEQUENCE, None)
        square = found is None or (found.ndim == 3 and found.shape[0] == found.shape[1])
        if found is not None and (found.dtype != bool or not square or not found.size):
            raise self._wrong(f"array {SEQUENCE!r} is {found.dtype}{list(found.shape)}; must be bool[N, N, packets]")
        for name, array in self.arrays.items():
            if name.partition(".")[0] not in RATES:
                phases = ", ".join(RATES)
                raise self._wrong(f"holds an array {name!r}; names must begin with one of {phases}")
            if array.dtype != bool or array.ndim != 4 or array.shape[1] != array.shape[2]:
                raise self._wrong(
                    f"array {name!r} is {array.dtype}{list(array.shape)}; must be bool[steps, N, N, units]"
                )

    def _wrong(self, why: str) -> UsageError:
        return refuse("--trace", self.path, why)

    @classmethod
    def plan(cls, config: LossyConfig, phase: str) -> PhaseLoss:
        loss = super().plan(config, phase)
        assert config.trace is not None, "sets_rate refuses this"
        return replace(loss, trace=Path(config.trace), lossless=False)

    @classmethod
    def sets_rate(cls, config: LossyConfig, phase: str) -> str | None:
        if config.trace is None:
            raise refuse("--loss-model", cls.name, "needs --trace PATH")
        if config.loss_correlation != "independent":
            raise refuse("--loss-correlation", config.loss_correlation, "a trace has common losses already")
        return f"--loss-model {cls.name}"

    def _array(self, phase: str, stream: Stream) -> np.ndarray:
        names = (f"{phase}.{stream.name}", f"{phase}.{stream.drawn.name}", phase)
        array = next((self.arrays[name] for name in names if name in self.arrays), None)
        if array is None:
            raise self._wrong(f"holds neither an array {phase!r} nor '{phase}.{stream.name}'")
        return array

    def steps(self, phase: str, stream: Stream) -> int | None:
        return None if self._sequence is not None else len(self._array(phase, stream))

    def check(self, phase: str, stream: Stream, size: int, units: int | None, steps: int | None) -> None:
        if self._sequence is not None:
            if self._sequence.shape[0] not in (1, size):
                raise self._wrong(f"is of {self._sequence.shape[0]} ranks, but the group has {size}")
            return
        array = self._array(phase, stream)
        if array.shape[1] != size:
            raise self._wrong(f"is of {array.shape[1]} ranks, but the group has {size}")
        if units is not None and array.shape[3] != units:
            raise self._wrong(f"has {array.shape[3]} units per link in phase {phase}, this run has {units}")
        if steps is not None and array.shape[0] < steps:
            raise self._wrong(f"has {array.shape[0]} steps in phase {phase}, the run needs {steps}")

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        if self._sequence is not None:
            return self._next(self._sequence, exchange, sources, destinations, units)
        array = self._array(exchange.phase, exchange.stream)
        if not exchange.step < len(array):
            raise self._wrong(f"has {len(array)} steps; step {exchange.step} is not recorded")
        arrived: np.ndarray = array[exchange.step, sources, destinations]
        return arrived

    @staticmethod
    def _next(
        sequence: np.ndarray, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        """Return the part of a circular trace that a step takes: bool[L, units]. Steps of a stream follow one another.

        Phases, streams, and links that share a sequence, begin at places of their own.
        """
        length = sequence.shape[2]
        first = zlib.crc32(f"{exchange.phase}.{exchange.stream.drawn.name}".encode()) + exchange.step * units
        if len(sequence) == 1:
            links = sources * 2**16 + destinations
            sources = destinations = np.zeros_like(links)
            first = first + links % length * (2_654_435_761 % length)  # a prime, which spreads them over the circle
        places = (np.reshape(first, (-1, 1)) + np.arange(units)) % length
        found: np.ndarray = sequence[sources[:, None], destinations[:, None], places]
        return found
