"""The channels, errors and rules by the values of their flags; and the mechanisms.

Each has one line here, and its name in its own class.

A name stands for ``module:Class``, imported when it is first asked for: the flags are known where torch is not
installed, and ``config`` depends on no implementation. Packages of others add names by entry points, for example

    [project.entry-points."megatron_lossy.recovery"]
    half = "my_rule:Half"
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from .errors import UsageError, postpone
from .section import Flags


class Registry:
    """Names, in the order of ``built_in`` and then of the alphabet. It iterates over them, as argparse's choices do.

    Args:
        group: the entry points that add names.
        built_in: our own names, and ``module:Class`` of each.
    """

    def __init__(self, group: str, built_in: dict[str, str]) -> None:
        self.group = group
        self.built_in = built_in
        self._loaded: dict[str, type] = {}

    @cached_property
    def _targets(self) -> dict[str, str]:
        added = {point.name: point.value for point in entry_points(group=self.group)}
        return self.built_in | {name: added[name] for name in sorted(added.keys() - self.built_in.keys())}

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __contains__(self, name: object) -> bool:
        return name in self._targets

    def all(self) -> list[Any]:
        """Return all classes, in the order of the names."""
        return [self.load(name) for name in self]

    def ours(self) -> list[Any]:
        """Return Our own classes, without those of other packages."""
        return [self.load(name) for name in self.built_in]

    def load(self, name: str) -> Any:
        """Return the class called ``name``. Raise :class:`UsageError` if another package's class cannot be imported."""
        if name not in self._loaded:
            target = self._targets[name]
            module, _, attribute = target.partition(":")
            try:
                loaded = getattr(importlib.import_module(module), attribute)
                if getattr(loaded, "name", None) != name:  # the class is loaded again by its own name
                    raise AttributeError(f"its attribute name must be {name!r}")
                self._check(loaded)
            except Exception as error:  # a module of another package may raise anything
                if name in self.built_in:
                    raise
                kind = "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
                why = kind + " ".join(str(error).split())
                raise UsageError(f"{name}: the entry point {target} of {self.group} fails ({why})") from None
            self._loaded[name] = loaded
        return self._loaded[name]

    def _check(self, loaded: Any) -> None:
        """Raise ``AttributeError`` for a class without the attributes of the registry."""


class Mechanisms(Registry):
    """The registry of mechanisms, whose flags are needed as soon as ``config`` is imported."""

    @cached_property
    def _all(self) -> list[Any]:
        found = []
        for name in self:
            try:
                found.append(self.load(name))
            except UsageError as error:
                postpone(error)
        return found

    def all(self) -> list[Any]:
        """Return the classes that can be loaded. For the others a :class:`UsageError` is postponed."""
        return list(self._all)

    def attach(self, run: Any) -> None:
        """Attach all mechanisms to ``run``; none if its flags are inert."""
        for mechanism in () if run.config.inert else self.all():
            mechanism.attach(run)

    def drop(self, mechanism: Any, why: str) -> None:
        """Leave ``mechanism`` out from now on, and postpone a :class:`UsageError` that says ``why``."""
        self._all.remove(mechanism)
        name = mechanism.name
        postpone(UsageError(f"{name}: the entry point {self._targets[name]} of {self.group} fails ({why})"))

    def _check(self, loaded: Any) -> None:
        section = getattr(loaded, "Flags", None)
        if not (isinstance(section, type) and issubclass(section, Flags)):
            raise AttributeError("its attribute Flags must be a subclass of megatron_lossy.base.section.Flags")
        unset = [own.name for own in dataclasses.fields(section) if own.default is dataclasses.MISSING]
        if unset:
            raise AttributeError(f"{unset[0]} of its attribute Flags must have a default")


CHANNELS = Registry(
    "megatron_lossy.channel",
    {
        "bernoulli": "megatron_lossy.channel.bernoulli:Bernoulli",
        "gilbert-elliott": "megatron_lossy.channel.gilbert_elliott:GilbertElliott",
        "per-link": "megatron_lossy.channel.per_link:PerLink",
        "trace": "megatron_lossy.channel.trace:Trace",
    },
)

GRAD_RECOVERIES = Registry(
    "megatron_lossy.recovery",
    {
        "renormalize": "megatron_lossy.recovery.renormalize:Renormalize",
        "renormalize-remote": "megatron_lossy.recovery.renormalize:RenormalizeRemote",
        "previous": "megatron_lossy.recovery.previous:Previous",
        "zero": "megatron_lossy.recovery.base:Zero",
        "error-feedback": "megatron_lossy.recovery.feedback:ErrorFeedback",
    },
)

GRAD_ERRORS = Registry(
    "megatron_lossy.corruption",
    {
        "none": "megatron_lossy.channel.corruption.base:Nothing",
        "gaussian": "megatron_lossy.channel.corruption.gaussian:Gaussian",
        "bit-flip": "megatron_lossy.channel.corruption.bit_flip:BitFlip",
    },
)

#: In the order of their sections: of refusals, of which a user sees the first that applies, and of flags.
MECHANISMS = Mechanisms(
    "megatron_lossy.mechanisms",
    {
        "islands": "megatron_lossy.mechanisms.islands:Islands",
        "boundaries": "megatron_lossy.mechanisms.boundaries:Boundaries",
        "async-pipeline": "megatron_lossy.mechanisms.async_pipeline:AsyncPipeline",
        "replicas": "megatron_lossy.mechanisms.replicas:Replicas",
        "priority": "megatron_lossy.mechanisms.priority:Priorities",
        "lead": "megatron_lossy.mechanisms.lead:Lead",
        "compression": "megatron_lossy.mechanisms.compression:Compression",
    },
)

#: Kinds of several jobs in one run, by the name of one job.
JOBS = Registry("megatron_lossy.jobs", {"island": "megatron_lossy.mechanisms.islands:IslandJobs"})
