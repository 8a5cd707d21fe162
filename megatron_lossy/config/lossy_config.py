"""All loss flags in one object: the sections of the core, and one of each mechanism.

:mod:`megatron_lossy.base.flags` makes the argparse group and the table in ``docs/flags.md`` from :class:`LossyConfig`.
``docs/semantics.md`` has the semantics of each flag.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..base.errors import Collector, UsageError, raise_postponed, refuse
from ..base.flags import as_flag, flag_name, full_name
from ..base.registry import CHANNELS, GRAD_RECOVERIES, MECHANISMS
from ..base.section import Flags
from .core import PHASES, CoreFlags, PhaseLoss, RecoveryFlags, Schedule, split_model, value_of
from .grad_errors import ErrorFlags
from .refusal import check_refusals
from .transport import OBSERVED, TransportFlags


def _sections() -> tuple[type[Flags], ...]:
    """Return the sections of the core and of mechanisms. A mechanism whose flags others have is left out."""
    sections: list[type[Flags]] = [CoreFlags, RecoveryFlags, TransportFlags, ErrorFlags]
    owners = {name: section for section in sections for name in _own_names(section)}
    for mechanism in MECHANISMS.all():
        names = _own_names(mechanism.Flags)
        taken = sorted(names & owners.keys())
        if taken:
            first, owner = taken[0], owners[taken[0]]
            what = flag_name(owner, first) if first in owner.__dataclass_fields__ else first
            MECHANISMS.drop(mechanism, f"{what} of {full_name(mechanism.Flags)} is taken by {full_name(owner)}")
            continue
        owners |= dict.fromkeys(names, mechanism.Flags)
        sections.append(mechanism.Flags)
    return tuple(sections)


def _own_names(section: type[Flags]) -> set[str]:
    """Return the names that ``section`` adds to those of all sections."""
    return {name for name in {*vars(section), *section.__dataclass_fields__} - set(dir(Flags)) if name[0] != "_"}


#: The sections, in the order in which they are asked, in help, and in the documentation.
SECTIONS = _sections()
#: The flags (fields) for which a section is asked.
_ASKED_FOR = {
    section: {*(section.triggers or ()), *(own.name for own in dataclasses.fields(section))} for section in SECTIONS
}
#: The flag (field) with the loss rate of each phase that has one.
RATES: Mapping[str, str] = {phase: name for section in SECTIONS for phase, name in section.rates.items()}


def given(config: Any) -> dict[str, Any]:
    """Return the settings of ``config`` other than the defaults, once those that depend on other flags are set.

    These settings alone make the same configuration again.
    """
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    if not isinstance(config, LossyConfig):
        return {name: value for name, default in defaults.items() if (value := getattr(config, name)) != default}
    alone = vars(LossyConfig())
    return {
        name: value
        for name, default in defaults.items()
        if (value := getattr(config, name)) != alone[name] or (default is None and _depends(config, name))
    }


def _depends(config: LossyConfig, name: str) -> bool:
    """Return whether ``name`` would have another value in ``config`` if it had not been given."""
    if getattr(config, name) is None:
        return False
    others: dict[str, Any] = {name: None}
    try:
        return getattr(dataclasses.replace(config, **others), name) != getattr(config, name)
    except UsageError:
        return True


@dataclass(frozen=True)
class LossyConfig(*reversed(SECTIONS)):  # type: ignore[misc]  # fields come in the order of the sections
    """Every loss flag. Raises :class:`UsageError` where a value is not allowed."""

    def __post_init__(self) -> None:
        raise_postponed()
        self.resolve()
        problems = Collector()
        for name in ("loss_model", "loss_schedule"):
            with problems.noting():
                self._check_number(name)
        with problems.noting():
            self.check()
        problems.finish()
        if RecoveryFlags in self.used:
            GRAD_RECOVERIES.load(self.grad_recovery).check(self)
        for phase in self.exchanges():
            self.phase(phase)
        check_refusals(self)

    def _check_number(self, name: str) -> None:
        """Raise :class:`UsageError` unless the flag has one value for all phases, one for each of two, or for all."""
        values, phases = getattr(self, name), self.exchanges()
        if values is not None and len(values) not in (1, 2, len(phases)):
            more = "" if len(phases) == 2 else f", or {len(phases)}: {', '.join(phases)}"
            why = f"takes one value for all phases, or two: gradients, parameters{more}"
            raise refuse(flag_name(LossyConfig, name), " ".join(map(str, values)), why)

    # --- answers of all sections together --------------------------------------------------------------------------

    @property
    def used(self) -> tuple[type[Flags], ...]:
        """The sections that are asked: no flag of the others was given, and none of their triggers."""
        given = {name for name, unset in _unset().items() if getattr(self, name) not in unset}
        return tuple(section for section in SECTIONS if section.triggers is None or given & _ASKED_FOR[section])

    def _answers(self, question: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the answers of the sections that define the method ``question`` of :class:`.Flags` anew."""
        own = (getattr(section, question.__name__) for section in self.used)
        return [answer(self, *arguments) for answer in own if answer is not question]

    def resolve(self) -> None:
        self._answers(Flags.resolve)
        used = self.used
        for section in (section for section in SECTIONS if section not in used):
            for name, value in _resolved()[section].items():
                if getattr(self, name) is None:
                    object.__setattr__(self, name, value)

    def check(self) -> None:
        problems = Collector()
        for section in self.used:
            with problems.noting():
                section.check(self)
        problems.finish()

    def exchanges(self) -> tuple[str, ...]:
        return tuple(phase for phases in self._answers(Flags.exchanges) for phase in phases)

    def changes(self) -> bool:
        return not all(self.untouched(phase) for phase in PHASES) or any(self._answers(Flags.changes))

    def acts(self) -> bool:
        return self.changes() or any(self._answers(Flags.acts))

    def draws(self) -> bool:
        """Return whether losses are drawn, or happen in a network, so that ``loss_seed`` or a repetition can matter."""
        return self._draws_exchanges or any(self._answers(Flags.draws))

    def streams(self) -> bool:
        return not self.observed and any(self._answers(Flags.streams))

    def needs_whole_optimizers(self) -> bool:
        return any(self._answers(Flags.needs_whole_optimizers))

    def notes(self) -> list[str]:
        return [note for notes in self._answers(Flags.notes) for note in notes]

    def notes_beside(self) -> list[str]:
        return [note for notes in self._answers(Flags.notes_beside) for note in notes]

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        about: dict[str, tuple[bool, set[str]]] = {
            "no losses are drawn": (self._draws_exchanges, {"loss_correlation", "loss_model"}),
            "nothing that crosses a link can be lost": (
                self.loses_between_stages() or any(map(self.loses, self.exchanges())),
                {"lossy_links", "sites"},
            ),
            f"the unit of loss is a {self.loss_unit}": (self.loss_unit == "packet", {"packet_bytes"}),
        }
        for answer in self._answers(Flags.idle):
            for why, (used, names) in answer.items():
                others = about.get(why, (False, set()))
                about[why] = (used or others[0], names | others[1])
        return about

    @property
    def lossless(self) -> bool:
        """True if no flag can change any exchange or delay a stage, so that training must be exactly Megatron's."""
        return not self.changes()

    @property
    def inert(self) -> bool:
        """True if nothing at all is done: no loss, no error, no check and no averaging."""
        return not self.acts()

    # --- losses of a phase -----------------------------------------------------------------------------------------

    def rate(self, phase: str) -> float:
        """Return the mean loss rate that the flags give to ``phase``, unless something replaces it."""
        rate: float = getattr(self, RATES[phase])
        return rate

    @staticmethod
    def rate_flag(phase: str) -> str:
        """Return the flag of :meth:`rate`."""
        return flag_name(LossyConfig, RATES[phase])

    def phase(self, phase: str) -> PhaseLoss:
        """Return the losses of ``phase``, one with a loss rate. Raise :class:`UsageError`."""
        if phase not in PHASES and phase not in self.exchanges():
            return PhaseLoss("bernoulli", Schedule((0,), (0.0,)), lossless=True)
        loss: PhaseLoss = CHANNELS.load(self.model(phase)).plan(self, phase)
        return loss

    def model(self, phase: str) -> str:
        """Return the name of the channel of ``phase``."""
        return split_model(self.of_phase("loss_model", phase))[0]

    def model_argument(self, phase: str) -> str | None:
        """Return the text behind the name of the channel of ``phase`` and a colon in ``--loss-model``."""
        return split_model(self.of_phase("loss_model", phase))[1]

    def of_phase(self, name: str, phase: str) -> Any:
        """Return the value for ``phase``, one of :meth:`exchanges`, of a flag for several; ``None`` if it is not set.

        See :func:`.core.value_of`.
        """
        values = getattr(self, name)
        if values is None or len(values) == 1:
            return values and values[0]
        return value_of(values, phase, self.exchanges())

    @property
    def _draws_exchanges(self) -> bool:
        return any(not self.phase(phase).lossless for phase in self.exchanges())

    @property
    def within(self) -> str:
        """The transport of exchanges inside a job: the network that loses is between jobs, and so are datagrams and streams."""
        return "torch" if self.observed and self.jobs().several else self.transport

    def untouched(self, phase: str) -> bool:
        """Return whether the exchanges of ``phase`` are Megatron's own: without losses and by its own transport."""
        return self.within == "torch" and self.phase(phase).lossless and phase not in self.wire_bits

    def loses(self, phase: str) -> bool:
        """Return whether anything of ``phase`` can be lost, by drawing or by a network."""
        return (self.within if phase in PHASES else self.transport) in OBSERVED or not self.phase(phase).lossless

    def label(self, phase: str) -> str:
        """Return a name for the losses of ``phase``: a rate in percent, or the setting that replaces a rate."""
        own = {name: self.of_phase(name, phase) for name in ("loss_model", "loss_schedule")}
        label: str = CHANNELS.load(self.model(phase)).label({**dataclasses.asdict(self), **own}, phase)
        return label

    # --- in words --------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """Return losses and their recovery, in words."""
        beside = self.notes_beside() + self._idle_notes()
        if self.lossless:
            return "; ".join(["none, the exchanges are Megatron's own", *beside])
        notes = self.notes()
        if all(self.untouched(phase) for phase in PHASES):
            drawn = [f"seed {self.loss_seed}", "simulated"] if self.draws() or self.exchanges() != PHASES else []
            return "; ".join([*notes, *drawn, *beside])
        models = dict.fromkeys(map(self.model, PHASES))
        drawn = [
            f"gradients {self.label('grad')}, parameters {self.label('param')}",
            f"{' and '.join(models)}, seed {self.loss_seed}",
        ]
        if self.within in OBSERVED:
            nothing = all(self.phase(phase).lossless for phase in PHASES)
            drawn = ["what the network loses"] if nothing else [f"what the network loses, and {drawn[0]}", drawn[1]]
        unit = f"unit {self.loss_unit}" + (f" of {self.packet_bytes} bytes" if self.loss_unit == "packet" else "")
        crossing = {"torch": "simulated", "pieces": "simulated, in pieces"}
        crossing |= {"udp": f"over UDP, {self.udp_cipher}", "stream": f"over TCP, {self.udp_cipher}"}
        return "; ".join([*drawn, unit, *notes, crossing[self.within], *beside])

    def _idle_notes(self) -> list[str]:
        """Return sentences about given flags without effect: their subject is not lost, or is lost in other units."""
        settings = given(self)
        result = []
        for why, (used, names) in self.idle().items():
            idle = [] if used else [name for name in settings if name in names]
            if idle:
                flags = [as_flag(LossyConfig, name, settings[name]) for name in idle]
                result.append(f"{' and '.join(flags)} {'does' if len(idle) == 1 else 'do'} nothing, since {why}")
        return result


@functools.cache
def _resolved() -> dict[type[Flags], dict[str, Any]]:
    """Return, by section, the values that it gives to flags if all flags have their defaults."""
    unset = {section: object.__new__(LossyConfig) for section in SECTIONS}  # its class has the defaults
    for section, config in unset.items():
        section.resolve(config)
    return {section: dict(vars(config)) for section, config in unset.items()}


@functools.cache
def _unset() -> dict[str, tuple[Any, ...]]:
    """Return, by flag (field), its default, and the value that a section gives it then."""
    resolved = {name: value for values in _resolved().values() for name, value in values.items()}
    return {own.name: (own.default, resolved.get(own.name)) for own in dataclasses.fields(LossyConfig)}


for _mechanism in MECHANISMS.all():
    if _taken := sorted(_own_names(_mechanism.Flags) & vars(LossyConfig).keys()):
        MECHANISMS.drop(_mechanism, f"{_taken[0]} of {full_name(_mechanism.Flags)} is taken by LossyConfig")
