"""What an exchange of data is called: phase, stream, step."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = ("dense", "expert", "embedding")
_NAME = re.compile(r"([a-z]+)-e(\d+)-s(\d+)-c(\d+)")


@dataclass(frozen=True)
class Stream:
    """Whose buckets an exchange carries; ranks of tensor parallelism are not in it, so that they agree.

    A tied embedding that lives on several pipeline stages has the stream ``Stream("embedding")``, without a
    stage, so that its copies stay equal.
    """

    kind: str = "dense"
    expert_rank: int = 0
    stage: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        assert self.kind in KINDS
        assert all(0 <= value < 2**16 for value in (self.expert_rank, self.stage, self.chunk))

    @property
    def name(self) -> str:
        """A readable name, also the suffix of arrays in a trace: ``dense-e0-s0-c0``."""
        return f"{self.kind}-e{self.expert_rank}-s{self.stage}-c{self.chunk}"

    @classmethod
    def parse(cls, name: str) -> Stream:
        """The inverse of :attr:`name`. Raises ``ValueError``."""
        found = _NAME.fullmatch(name)
        if found is None or found[1] not in KINDS:
            raise ValueError(f"{name!r} is no stream")
        return cls(found[1], *map(int, found.groups()[1:]))


@dataclass(frozen=True)
class Exchange:
    """One exchange: the phase (``grad`` or ``param``), the stream, and the step it is keyed by."""

    phase: str
    stream: Stream
    step: int
