"""The base class of channels: a channel decides which units of an exchange arrive (docs/semantics.md).

Pure: NumPy only, no process group, no megatron.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ..base.errors import refuse
from ..base.exchange import Exchange, Stream
from ..base.flags import as_text
from ..base.registry import CHANNELS
from ..config import RATES, LossyConfig, PhaseLoss, Schedule, split_model


class Channel(ABC):
    """Decides which units of an exchange arrive on a link.

    Implementations are pure functions of their configuration and the arguments: both ends of a link and every process
    get the same answer, in any order of questions. ``together``: all receivers of one sender lose together.
    """

    #: The value of ``--loss-model``.
    name: ClassVar[str]
    #: Whether the flags alone decide the losses, so that a record needs only a digest.
    redrawable: ClassVar[bool] = True

    def __init__(self, loss: PhaseLoss, seed: int, together: bool = False) -> None:
        self.loss = loss
        self.seed = seed
        self.together = together

    # --- flags ---------------------------------------------------------------------------------------------------

    @classmethod
    def plan(cls, config: LossyConfig, phase: str) -> PhaseLoss:
        """Return the losses of ``phase`` with this channel. Raise :class:`UsageError` for flags that do not fit."""
        if config.trace is not None and "trace" not in {split_model(model)[0] for model in config.loss_model}:
            raise refuse("--trace", config.trace, f"needs --loss-model trace, not {cls.name}")
        rate, schedule = config.rate(phase), config.of_phase("loss_schedule", phase)
        instead = cls.sets_rate(config, phase)
        if schedule is not None:
            if instead:
                raise refuse("--loss-schedule", schedule, f"cannot be combined with {instead}")
            instead = "--loss-schedule"
        if rate and instead:
            raise refuse(config.rate_flag(phase), rate, f"cannot be combined with {instead}, which sets the rate")
        plan = Schedule.parse(schedule) if schedule is not None else Schedule((0,), (rate,))
        return PhaseLoss(cls.name, plan, lossless=not any(plan.rates))

    @classmethod
    def sets_rate(cls, config: LossyConfig, phase: str) -> str | None:
        """Return the flag that sets the rate in place of ``--p-grad`` and ``--p-param``. Raise :class:`UsageError`."""
        if config.model_argument(phase) is not None:
            raise refuse("--loss-model", as_text(config.loss_model), f"{cls.name} takes nothing after a colon")
        return None

    @classmethod
    def label(cls, flags: Mapping[str, Any], phase: str) -> str:
        """Return the name of the losses of ``phase`` in a table.

        ``flags``: the flags of the run, by their field names; ``loss_model`` and ``loss_schedule`` have the one value
        of ``phase``.
        """
        if not cls.redrawable:
            return cls.name
        schedule: str | None = flags.get("loss_schedule")
        return schedule or f"{100 * flags.get(RATES[phase], 0.0):g} %"

    @classmethod
    def drift(cls, loss: PhaseLoss, step: int, units: int) -> tuple[float, float] | None:
        """Return drift in the steady state at the rate of ``step``: to the owner, and between two receivers.

        The unit is squared increments, if these are uncorrelated (:mod:`megatron_lossy.base.theory`). ``units``: units of
        loss of a step. ``None`` if there is no closed form, or links differ.
        """
        return None

    def lag(self, step: int, source: int, destinations: np.ndarray, units: int) -> tuple[float, float] | None:
        """Return the share of units that miss an update, and their mean age, over ``destinations`` at ``step``'s rate.

        Both are of the steady state (:mod:`megatron_lossy.lab.theory.lag`). ``units``: units of loss per link and step.
        ``None`` if the flags do not determine it.
        """
        return None

    # --- losses --------------------------------------------------------------------------------------------------

    @abstractmethod
    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        """Return bool[L, units]: True where the unit arrives, on L links from ``sources`` to ``destinations``.

        Both are integers [L], ranks in the full group.
        """

    def steps(self, phase: str, stream: Stream) -> int | None:
        """Return the number of steps that this channel has, from step 0 on; ``None``: any."""
        return None

    def check(self, phase: str, stream: Stream, size: int, units: int | None, steps: int | None) -> None:
        """Raise :class:`UsageError` if this channel cannot serve a group.

        ``size`` ranks exchange ``units`` units per link and step (``None``: not known yet) for ``steps`` steps
        (``None``: not known).
        """


#: Between the seeds of the passes of a message: an odd number, so that those of two passes never meet.
_BETWEEN_PASSES = 0x9E3779B97F4A7C15


class Repetition(Channel):
    """Sends each unit of a message several times: it is lost if all ``passes``, channels of their own, lose it."""

    name = "repeated"

    def __init__(self, passes: Sequence[Channel]) -> None:
        first = passes[0]
        super().__init__(first.loss, first.seed, first.together)
        self._passes = passes

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        found = [channel.delivered_links(exchange, sources, destinations, units) for channel in self._passes]
        return np.logical_or.reduce(found)

    def steps(self, phase: str, stream: Stream) -> int | None:
        return self._passes[0].steps(phase, stream)

    def check(self, phase: str, stream: Stream, size: int, units: int | None, steps: int | None) -> None:
        self._passes[0].check(phase, stream, size, units, steps)


def make_channel(config: LossyConfig, phase: str) -> Channel:
    """Return the channel of ``phase``. Raise :class:`UsageError` for unreadable files."""
    loss, together = config.phase(phase), config.loss_correlation == "source"
    kind, copies = CHANNELS.load(loss.model), config.copies(phase)
    if copies == 1 or not kind.redrawable:  # the record is of the final arrivals
        return kind(loss, config.loss_seed, together)
    seeds = [(config.loss_seed + number * _BETWEEN_PASSES) % 2**64 for number in range(copies)]
    return Repetition([kind(loss, seed, together) for seed in seeds])
