"""What an exchange of data is called: phase, stream, step."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

KINDS = ("dense", "expert", "embedding", "boundary", "islands")
_NAME = re.compile(r"([a-z]+)-e(\d+)-s(\d+)-c(\d+)(?:-t(\d+))?")


@dataclass(frozen=True)
class Stream:
    """Whose buckets an exchange carries.

    Losses that are drawn are the same for all ranks of tensor parallelism, and for all copies of a tied embedding: theirs
    is ``Stream("embedding")``, without a stage. A network loses something else for each of them: there ``tensor`` is the
    tensor-parallel rank, and a tied embedding has its stage.

    Between islands, ``expert_rank`` is the data-parallel rank within its island: it exchanges its own shard.

    Of a boundary between pipeline stages, ``stage`` and ``chunk`` are those of the later stage, in both directions, and
    ``expert_rank`` is the data-parallel rank.
    """

    kind: str = "dense"
    expert_rank: int = 0
    stage: int = 0
    chunk: int = 0
    tensor: int | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS
        assert all(0 <= value < 2**16 for value in (self.expert_rank, self.stage, self.chunk))

    @property
    def name(self) -> str:
        """A readable name, also the suffix of arrays in a trace: ``dense-e0-s0-c0``, with a tensor rank ``…-t1``."""
        tensor = "" if self.tensor is None else f"-t{self.tensor}"
        return f"{self.kind}-e{self.expert_rank}-s{self.stage}-c{self.chunk}{tensor}"

    @property
    def drawn(self) -> Stream:
        """Of the same buckets, the stream by which losses are drawn."""
        return Stream("embedding") if self.kind == "embedding" else replace(self, tensor=None)

    @classmethod
    def parse(cls, name: str) -> Stream:
        """The inverse of :attr:`name`. Raises ``ValueError``."""
        found = _NAME.fullmatch(name)
        if found is None or found[1] not in KINDS:
            raise ValueError(f"{name!r} is no stream")
        tensor = None if found[5] is None else int(found[5])
        return cls(found[1], int(found[2]), int(found[3]), int(found[4]), tensor)


@dataclass(frozen=True)
class Exchange:
    """One exchange: the phase, the stream, and the step it is keyed by.

    Phases are ``grad`` and ``param``; at boundaries between pipeline stages ``act`` and ``act-grad``; between islands
    ``sync-reduce`` and ``sync-gather``, whose ranks are the islands.
    """

    phase: str
    stream: Stream
    step: int
