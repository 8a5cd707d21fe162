"""The meaning of events: which columns they have, which of them a run can have, and how they are drawn again.

A mechanism registers the kinds of its own events (:meth:`.Mechanism.events`). Those of errors in gradients are here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ..base.exchange import Exchange, Stream
from ..base.registry import MECHANISMS
from ..channel.corruption import REDUCED, SPARED, Corruption, Event, make_corruption
from ..config import LossyConfig

if TYPE_CHECKING:
    import pyarrow

Row = Mapping[str, Any]
#: Kinds of events that are errors.
ERRORS = ("gaussian", "bit-flip")


class Kinds(ABC):
    """Kinds of events that belong together. ``config``: the flags of the run."""

    #: Values of the column ``kind``.
    names: ClassVar[Sequence[str]]

    def __init__(self, config: LossyConfig) -> None:
        self.config = config

    @staticmethod
    @abstractmethod
    def columns() -> list[pyarrow.Field]:
        """Return the columns that these kinds add to the table; they are null in rows of other kinds."""

    @abstractmethod
    def happen(self) -> bool:
        """Return whether the flags can lead to such events."""

    @abstractmethod
    def check(self, iteration: int, rows: Sequence[Row]) -> None:
        """Check all rows of these kinds in one file and ``iteration``. Raises ``ValueError``, or ``TypeError`` for a null."""

    def missing(self) -> list[str]:
        """Return a line for each absence that :meth:`check` could not see in a single file."""
        return []

    def summary(self, rows: Iterable[tuple[int, Row]]) -> list[str]:
        """Return lines about all rows of these kinds, each with the rank that wrote it, for ``summary``."""
        return []


def all_kinds() -> list[type[Kinds]]:
    """Return the kinds of the core and of all mechanisms."""
    of_mechanisms = (mechanism.events() for mechanism in MECHANISMS.all())
    return [GradErrors, *(kinds for kinds in of_mechanisms if kinds is not None)]


class GradErrors(Kinds):
    """Errors in reduced gradients, and the reductions in which they are drawn.

    Two things cannot be drawn again: the size of noise in units of the gradient, and the errors of a replayed log. For
    these only the digest of the file's rows is checked.
    """

    names = (*ERRORS, SPARED, REDUCED)

    def __init__(self, config: LossyConfig) -> None:
        super().__init__(config)
        self._ranks: dict[str, set[int]] = {}  # by stream

    @staticmethod
    def columns() -> list[pyarrow.Field]:
        import pyarrow as pa

        return [
            pa.field("rank", pa.int32()),
            pa.field("bucket", pa.int32()),
            pa.field("std", pa.float64()),
            pa.field("seed", pa.uint64()),
            pa.field("elements", pa.list_(pa.int64())),
            pa.field("bits", pa.list_(pa.int8())),
            pa.field("digest", pa.binary()),
            pa.field("sizes", pa.list_(pa.int64())),
            pa.field("width", pa.int32()),
        ]

    def happen(self) -> bool:
        return self.config.errs

    @cached_property
    def _corruption(self) -> Corruption:
        return make_corruption(self.config)

    def check(self, iteration: int, rows: Sequence[Row]) -> None:
        errors: dict[tuple[str, int], dict[int, Row]] = {}
        for row in rows:
            if row["kind"] != REDUCED:
                own = errors.setdefault((row["stream"], row["rank"]), {})
                if own.setdefault(row["bucket"], row) is not row:
                    raise ValueError(f"two records of {_where(row)}")
        for row in rows:
            if row["kind"] == REDUCED:
                self._ranks.setdefault(row["stream"], set()).add(row["rank"])
                own = errors.pop((row["stream"], row["rank"]), {})
                if self.config.error_kind != "trace":
                    self._check_drawn(iteration, row, own)
        for own in errors.values():
            raise ValueError(f"an error in {_where(next(iter(own.values())))}, which was not reduced")

    def _check_drawn(self, iteration: int, reduction: Row, recorded: Mapping[int, Row]) -> None:
        exchange = Exchange("grad", Stream.parse(reduction["stream"]), iteration)
        events = self._corruption.events(exchange, reduction["rank"], reduction["sizes"], reduction["width"])
        drawn = {event.bucket: event for event in events}
        for bucket in sorted(drawn.keys() | recorded.keys()):
            where = _where({**reduction, "bucket": bucket})
            if bucket not in drawn:
                raise ValueError(f"the recorded seed draws no error in {where}")
            if bucket not in recorded:
                raise ValueError(f"no record of the error in {where} that the recorded seed draws")
            if not _same(drawn[bucket], recorded[bucket]):
                raise ValueError(f"the error drawn again from the recorded seed in {where} is not the one recorded")

    def missing(self) -> list[str]:
        """Return a line for each rank without any record, while others of its group have some."""
        return [
            f"no errors of rank {rank} of {stream}"
            for stream, ranks in sorted(self._ranks.items())
            for rank in sorted(set(range(max(ranks) + 1)) - ranks)
        ]


def event_of(row: Row) -> Event:
    """Return the error in a row of one of the kinds :data:`ERRORS`. Raises ``ValueError``, ``TypeError``."""
    stream = Stream.parse(row["stream"])
    elements, bits = tuple(row["elements"]), tuple(row["bits"])
    return Event(
        row["iteration"], stream, row["bucket"], row["rank"], row["kind"],
        std=row["std"], seed=row["seed"], elements=elements, bits=bits, digest=row["digest"],
    )  # fmt: skip


def _where(row: Row) -> str:
    return f"bucket {row['bucket']} of rank {row['rank']} of {row['stream']}"


def _same(drawn: Event, row: Row) -> bool:
    """Return whether ``row`` is the drawn error, except for the size of noise in units of a gradient.

    Only such noise can have had no effect.
    """
    if row["kind"] == SPARED:
        return drawn.relative
    recorded = event_of(row)
    if drawn.relative:
        return 0 < recorded.std < math.inf and (drawn.kind, drawn.seed) == (recorded.kind, recorded.seed)
    return drawn == recorded
