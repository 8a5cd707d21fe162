"""Runs, read from the ``metrics.jsonl`` that training writes; :mod:`.read` reads those of Megatron-LM, too.

The first line describes the run (``kind`` = ``run``: name, p_grad, p_param, loss_seed, seed, config). Then come records
of training (``train``: iteration, lm loss, skipped, …) and of evaluation (``valid``: iteration, lm loss, weights). A
killed run may leave a last line without an end, which is left out. A resumed run continues the same file from its
checkpoint: a record of an iteration replaces all records from there on.

A "train" record's other numbers are the run's scalars, by name and iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...base.errors import refuse
from ...base.flags import of_flags
from ...base.registry import CHANNELS, MECHANISMS
from ...config import LossyConfig, split_model, value_of
from ...config.grad_errors import ErrorFlags
from ...config.transport import OBSERVED
from ...mechanisms.replicas.flags import ReplicaFlags

WEIGHTS = ("replica", "owner", "consensus")
LOSS = "lm loss"
#: Ends a name of a scalar that is to be taken over the whole run, and not at its end.
WHOLE = " (run)"
# The keys of a "train" record that are no scalars.
_NO_SCALARS = {"kind", "iteration", LOSS}
# Some scalars are a record's largest or smallest value. Their mean over records would be neither.
_SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min}


@dataclass
class Run:
    """One training run.

    ``train`` maps an iteration to the training loss recorded there: the mean since the record before. It is NaN if the
    loss was not finite, and missing if the optimizer skipped every iteration of the record. ``valid`` maps weights
    (``replica``, ``owner``, ``consensus`` of jobs) to iterations to validation losses.
    """

    name: str
    p_grad: float
    p_param: float
    loss_seed: int | None
    seed: int | None
    config: dict[str, Any]
    train: dict[int, float] = field(default_factory=dict)
    valid: dict[str, dict[int, float]] = field(default_factory=dict)
    iterations: int = 0
    """The last iteration trained."""
    origin: dict[str, Any] = field(default_factory=dict)
    """The origin of the run, as far as it was recorded: ``date``, ``hardware``, ``versions``."""
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    """All other numbers of its training records, by name and iteration; NaN where one was not finite."""

    @property
    def condition(self) -> tuple[str, str]:
        """The losses of gradients and parameters, as labels: a rate in percent, or the flag that replaces a rate."""
        return self._loss("grad", self.p_grad), self._loss("param", self.p_param)

    @property
    def label(self) -> str:
        """The heading of the run's column: ``10 %``, or ``g 10 % / p 0 %`` if the phases differ."""
        grad, param = self.condition
        return grad if grad == param else f"g {grad} / p {param}"

    @property
    def lossless(self) -> bool:
        """Whether the run lost nothing, and nothing in it was late on purpose."""
        sections = (of_flags(mechanism.Flags, self.config) for mechanism in MECHANISMS.all())
        return self.condition == ("0 %", "0 %") and not any(section.changes() for section in sections)

    @property
    def clean(self) -> bool:
        """Whether nothing was lost or wrong in the run: the baseline."""
        errors, replicas = of_flags(ErrorFlags, self.config), of_flags(ReplicaFlags, self.config)
        averages = replicas.synchronises and replicas.averages_always  # which changes equal replicas too
        return self.lossless and not errors.errs and not averages

    @property
    def diverged(self) -> bool:
        """Whether the last training loss is not finite."""
        return bool(self.train) and math.isnan(self.train[max(self.train)])

    @property
    def train_loss(self) -> float:
        """Mean training loss over the last 10 % of the iterations (at least 10); NaN if it is not finite."""
        last = self._last(self.train)
        return float(np.mean(last)) if last else math.nan

    def valid_loss(self, weights: str) -> float | None:
        """Return loss of the last evaluation with ``weights``; None if there was none.

        It is NaN if the run diverged, before any evaluation or since.
        """
        losses = self.valid.get(weights)
        if self.diverged and (losses or not self.valid):
            return math.nan
        return losses[max(losses)] if losses else None

    def recorded(self, name: str) -> dict[int, float]:
        """Return the scalar ``name`` by iteration, empty if it was never recorded; ``lm loss`` is the training loss."""
        name = name.removesuffix(WHOLE)
        return self.train if name == LOSS else self.scalars.get(name, {})

    def scalar(self, name: str) -> float | None:
        """Return the scalar ``name`` at the end of the run; None if it was never recorded.

        It is the mean of its finite values in the last 10 % of the iterations (at least 10), or the last value before
        if it was not recorded there. For a name that ends in "max" or "min" it is the largest or smallest of these
        values. It is NaN if the run diverged or if no value there is finite. With " (run)" behind a name it is the median of
        all records.
        """
        whole = name.endswith(WHOLE)
        if not (values := self.recorded(name)):
            return None
        last = list(values.values()) if whole else self._last(values) or [values[max(values)]]
        finite = [value for value in last if math.isfinite(value)]
        if self.diverged or not finite:
            return math.nan
        return float((np.median if whole else _SUMMARIES.get(name.rpartition(" ")[2], np.mean))(finite))

    def _last(self, values: dict[int, float]) -> list[float]:
        first = self.iterations - max(10, math.ceil(self.iterations / 10))
        return [value for iteration, value in values.items() if iteration > first]

    def _loss(self, phase: str, rate: float) -> str:
        own = {"loss_model": LossyConfig.loss_model[0], "loss_schedule": None}
        for name in own:
            if values := self.config.get(name):
                own[name] = values if isinstance(values, str) else value_of(values, phase)
        model, _ = split_model(own["loss_model"])
        if model not in CHANNELS:  # its package is not installed here
            return model
        label = CHANNELS.load(model).label({**self.config, **own, f"p_{phase}": rate}, phase)
        over = self.config.get("transport")
        if over in OBSERVED:
            return over if label == "0 %" else f"{over} and {label}"
        return label


class RunRecorder:
    """Builds a run from its records, in the order in which they were written."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._recorded: list[int] = []  # the iterations of the training records so far, ascending

    def check_same(self, other: Run, where: str) -> None:
        """Raise :class:`UsageError` if ``other``, described at ``where``, is not this run."""
        if (self.run.condition, self.run.loss_seed) != (other.condition, other.loss_seed):
            raise refuse("RUNS_DIR", where, "describes another run than what precedes it")

    def add(self, kind: str, record: dict[str, Any]) -> None:
        """Add a "train" or "valid" record."""
        run, iteration = self.run, record["iteration"] + 0
        if kind == "valid":
            run.valid.setdefault(record.get("weights") or "replica", {})[iteration] = _number(record[LOSS])
            return
        if iteration <= run.iterations:  # resumed from an earlier checkpoint
            for values in (run.train, *run.valid.values(), *run.scalars.values()):
                for stale in [i for i in values if i >= iteration]:
                    del values[stale]
            while self._recorded and self._recorded[-1] >= iteration:
                self._recorded.pop()
        covered = iteration - (self._recorded[-1] if self._recorded else 0)
        self._recorded.append(iteration)
        run.iterations = iteration
        if (record.get("skipped") or 0) < covered:  # else the mean is over no iteration
            run.train[iteration] = _number(record[LOSS])
        for name, value in record.items():
            if name not in _NO_SCALARS and (value is None or type(value) in (int, float)):
                run.scalars.setdefault(name, {})[iteration] = _number(value)


def _number(value: Any) -> float:
    """Return the number in ``value``. JSON has no NaN; some writers use null."""
    number = math.nan if value is None else value + 0.0
    return number if math.isfinite(number) else math.nan
