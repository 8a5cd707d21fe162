"""Losses with a rate for every link, from a matrix file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ..base.errors import UsageError, refuse
from ..base.exchange import Exchange, Stream
from ..config import LossyConfig, PhaseLoss
from .draws import DrawnChannel


def read_matrix(path: Path) -> np.ndarray:
    """Return float64[N, N] from a .npy or text file (blanks or commas); row = source. Raise :class:`UsageError`."""

    def wrong(why: str) -> UsageError:
        return refuse("--loss-model", f"per-link:{path}", why)

    try:
        if path.suffix == ".npy":
            matrix = np.load(path, allow_pickle=False)
        else:
            rows = [line.split("#")[0].replace(",", " ").split() for line in path.read_text().splitlines()]
            matrix = np.array([[float(value) for value in row] for row in rows if row])
    except (OSError, ValueError) as error:
        raise wrong(f"must be a readable square matrix of numbers ({error})") from None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise wrong(f"must be a square matrix, not of shape {matrix.shape}")
    matrix = matrix.astype(np.float64)
    beyond = np.argwhere(~((matrix >= 0) & (matrix < 1)))
    for row, column in beyond[:1]:
        raise wrong(f"row {row}, column {column} is {matrix[row, column]}; rates must be in [0, 1)")
    return matrix


class PerLink(DrawnChannel):
    """Loses each unit independently with the rate of its link."""

    name = "per-link"
    redrawable = False  # the rates are in a file

    def __init__(self, loss: PhaseLoss, seed: int, together: bool = False) -> None:
        super().__init__(loss, seed, together)
        assert loss.matrix is not None, "plan sets it"
        self.rates = read_matrix(loss.matrix)

    @classmethod
    def plan(cls, config: LossyConfig, phase: str) -> PhaseLoss:
        loss = super().plan(config, phase)
        file = config.model_argument(phase)
        return replace(loss, matrix=Path(file or ""), lossless=False)

    @classmethod
    def sets_rate(cls, config: LossyConfig, phase: str) -> str | None:
        if not config.model_argument(phase):
            raise refuse("--loss-model", cls.name, "needs a matrix of rates: per-link:FILE")
        return f"--loss-model {cls.name}"

    def lag(self, step: int, source: int, destinations: np.ndarray, units: int) -> tuple[float, float]:
        rates = self.rates[source, destinations]
        return float(rates.mean()), float((rates / (1 - rates)).mean())

    def check(self, phase: str, stream: Stream, size: int, units: int | None, steps: int | None) -> None:
        if len(self.rates) != size:
            why = f"is {len(self.rates)} x {len(self.rates)}, but the {stream.kind} group has {size} ranks"
            raise refuse("--loss-model", f"{self.name}:{self.loss.matrix}", why)

    def draw_links(self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int) -> np.ndarray:
        return ~self.uniforms(0, exchange, sources, destinations, units).below(self.rates[sources, destinations])
