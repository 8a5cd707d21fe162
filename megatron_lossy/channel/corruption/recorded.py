"""Errors recorded in another run: flips come back by their place, noise by its seed."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ...base.errors import refuse
from ...base.exchange import Exchange, Stream
from ...config import LossyConfig
from ...config.grad_errors import ErrorFlags
from .base import Corruption, Event

logger = logging.getLogger(__name__)


class Recorded(Corruption):
    """Replays events. Iterations without any have no errors."""

    name = "trace"
    flags = ("grad_error_at",)

    def __init__(self, config: LossyConfig, recorded: Iterable[Event] = ()) -> None:
        super().__init__(config)
        self._events: dict[tuple[int, Stream, int], list[Event]] = defaultdict(list)
        for event in recorded:
            self._events[event.iteration, event.stream, event.rank].append(event)
        for events in self._events.values():
            events.sort(key=lambda event: event.bucket)
        self._warned = False

    @classmethod
    def check(cls, config: ErrorFlags) -> None:
        if config.error_folder is None:
            raise refuse("--grad-error", "trace", "needs the folder of the recorded errors: trace:FOLDER")

    @classmethod
    def describe(cls, config: ErrorFlags) -> str:
        return f"those recorded in {config.error_folder}"

    def events(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        return self.draw(exchange, rank, sizes, width)

    def draw(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        found = self._events.get((exchange.step, exchange.stream, rank), [])
        for event in found:
            largest = max(event.elements, default=0)
            if event.bucket >= len(sizes) or largest >= sizes[event.bucket] or max(event.bits, default=0) >= width:
                where = f"iteration {event.iteration} hit element {largest} of bucket {event.bucket}"
                raise refuse("--grad-error", self.config.grad_error, f"is of another model: {where}")
        return found

    def differs(self, event: Event) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "--grad-error %s: after the error in iteration %d the gradient of rank %d is not the recorded one: "
                "another run, or noise of another kind of device (said once)",
                self.config.grad_error,
                event.iteration,
                event.rank,
            )
