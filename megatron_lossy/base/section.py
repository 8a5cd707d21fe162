"""A section of the loss flags: those of the core, or of one mechanism. It answers for itself what all need to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .jobs import Jobs


@dataclass(frozen=True)
class Flags:
    """The base of all sections. :class:`.LossyConfig` inherits every section, and asks each in turn.

    A section defines the answers that it has. It may read the flags of the core, and no flag of another mechanism.
    """

    #: The flag (field) with the loss rate of each phase of the section.
    rates: ClassVar[Mapping[str, str]] = {}
    #: What one of :meth:`jobs` is called, if the section can make several.
    job_name: ClassVar[str | None] = None
    #: Folders with weights alone beside those of checkpoints, and the flag that makes each.
    folders_of_weights: ClassVar[Mapping[str, str]] = {}
    #: Whether reports name each given flag of the section in the heading of a run.
    in_headings: ClassVar[bool] = False
    #: The flags that lose parts of messages between pipeline stages.
    stage_losses: ClassVar[tuple[str, ...]] = ()

    def resolve(self) -> None:
        """Give flags their defaults that depend on other flags. Values are not checked yet."""

    def check(self) -> None:
        """Raise :class:`UsageError` for values that are not allowed, and for flags that do nothing."""

    def exchanges(self) -> tuple[str, ...]:
        """The phases whose losses the channels decide."""
        return ()

    def changes(self) -> bool:
        """Whether an exchange, or the order of work, is not Megatron's own."""
        return False

    def acts(self) -> bool:
        """Whether anything is done at all. A section that does something without :meth:`changes` says so here."""
        return self.changes()

    def draws(self) -> bool:
        """Whether losses beside those of :meth:`exchanges` are drawn, or happen in a network."""
        return False

    def loses_between_stages(self) -> bool:
        """Whether parts of messages between pipeline stages can be lost."""
        return False

    def uses_transport(self) -> bool:
        """Whether messages beside those of :meth:`exchanges` cross over ``--transport``."""
        return False

    def notes(self) -> list[str]:
        """Words for the exchanges that the flags set in the place of Megatron's own."""
        return []

    def notes_beside(self) -> list[str]:
        """Words for all that the flags set beside exchanges."""
        return []

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        """Reasons for flags to do nothing, by sentence: whether they are of use nevertheless, and the flags."""
        return {}

    def needs_whole_optimizers(self) -> bool:
        """Whether the flags need full replicas: each rank with all of the optimizer."""
        return False

    def drawn_with(self, phase: str) -> Any:
        """The :class:`.LossyConfig` that exchanges of ``phase`` lose by, if it is another than was given; else ``None``."""
        return None

    def coded(self) -> tuple[str, ...]:
        """The phases whose values cross in codes."""
        return ()

    def chosen(self) -> tuple[str, ...]:
        """The phases whose senders choose units that must arrive."""
        return ()

    def sends_weights(self) -> bool:
        """Whether owners send their weights as they are."""
        return True

    def jobs(self) -> Jobs:
        """The jobs of a run."""
        return Jobs()

    def iterations(self, train_iters: int) -> int:
        """Iterations of the training loop for ``train_iters`` iterations of work."""
        return train_iters

    def most_iterations(self, iterations: int) -> int:
        """Iterations of the worker that makes most of them in ``iterations`` of the training loop."""
        return iterations

    def element_bytes(self) -> int:
        """Bytes of an element in exchanges of the section's own; 0 without any."""
        return 0

    def holds_samples(self) -> bool:
        """Whether samples are under way between iterations, if there are several pipeline stages."""
        return False

    def taints(self) -> bool:
        """Whether a run with these flags is no baseline, even if nothing is lost and nothing is late."""
        return False
