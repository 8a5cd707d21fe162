"""A section of the loss flags, of the core or of one mechanism, which answers questions about them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Flags:
    """The base of all sections. :class:`.LossyConfig` inherits every section, and asks each in turn.

    A section overrides the methods below that its flags change. All other methods of a section are its own:
    :class:`.LossyConfig` inherits them. A section may read the flags of the core, and no flag of another mechanism.
    """

    #: Fields of other sections for which this one is asked, as for its own: if one is not at its default. Otherwise its answers
    #: are those of this base, and none of its refusals applies. ``None``: it is always asked.
    triggers: ClassVar[Collection[str] | None] = ()
    #: Facts of a run with which its refusals apply all the same.
    trigger_facts: ClassVar[Collection[str]] = ()
    #: The flag (field) with the loss rate of each phase of the section.
    rates: ClassVar[Mapping[str, str]] = {}
    #: Whether reports name each given flag of the section in the heading of a run.
    in_headings: ClassVar[bool] = False

    def resolve(self) -> None:
        """Give flags their defaults that depend on other flags. Values are not checked yet."""

    def check(self) -> None:
        """Raise :class:`UsageError` for values that are not allowed, and for flags that do nothing."""

    def exchanges(self) -> tuple[str, ...]:
        """Return the phases whose losses the channels decide."""
        return ()

    def changes(self) -> bool:
        """Return whether an exchange, or the order of work, is not Megatron's own."""
        return False

    def acts(self) -> bool:
        """Return whether the flags have any effect. Override it for effects without :meth:`changes`."""
        return self.changes()

    def draws(self) -> bool:
        """Return whether losses besides those of :meth:`exchanges` are drawn, or happen in a network."""
        return False

    def streams(self) -> bool:
        """Return whether some exchanges cross as streams although ``--transport`` has neither these nor datagrams."""
        return False

    def notes(self) -> list[str]:
        """Return words for the exchanges that the flags set in the place of Megatron's own."""
        return []

    def notes_beside(self) -> list[str]:
        """Return a description of all that the flags set besides exchanges."""
        return []

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        """Return reasons for flags to do nothing, by sentence: whether they are of use nevertheless, and the flags."""
        return {}

    def needs_whole_optimizers(self) -> bool:
        """Return whether the flags need full replicas: each rank with all of the optimizer."""
        return False
