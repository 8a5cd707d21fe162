"""M worlds out of one launch: an island is a world of its own, whose ranks meet those of other islands outside it.

A program that asks torch for the default group, Megatron above all, sees the ranks of one island. Rank k of every
island meets rank k of the others over host memory, in groups that are not in the default world.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch

from ...base.device.attempt import attempt_store
from ...base.errors import refuse

_store: Any = None  # the store of all launched ranks in this attempt; its server must not be started twice
_opened = 0
_LOOK = 0.1  # seconds


class IslandWorld:
    """The place of this rank in ``islands`` islands of equally many consecutive ranks. Raises :class:`UsageError`.

    ``launched_rank``, ``launched_ranks``: among all; ``island``, and ``job``: see :class:`megatron_lossy.base.jobs.World`;
    ``rank``, ``size``: within the island. ``seed``: for the exchanges, the same for all.
    """

    def __init__(self, islands: int, seed: int = 0) -> None:
        self.islands, self.seed = islands, seed
        self.launched_rank = int(os.environ.get("RANK", "0"))
        self.launched_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if self.launched_ranks % islands:
            raise refuse("--islands", islands, f"must divide the {self.launched_ranks} ranks")
        self.size = self.launched_ranks // islands
        self.island, self.rank = divmod(self.launched_rank, self.size)
        self.job = self.island, islands
        #: Seconds that a rank waits for another one.
        self.patience = 600.0
        self._prefix = ""

    def tell_environment(self) -> None:
        """Set RANK and WORLD_SIZE to those of the island, for a program that reads them later."""
        os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(self.size)}

    def compare(self, settings: Mapping[str, str]) -> None:
        """Compare nothing: all islands have one command line."""

    def open(self, init_process_group: Callable[..., Any], timeout: timedelta) -> None:
        """See :meth:`.base.jobs.World.open`."""
        global _store, _opened
        self.patience = timeout.total_seconds()
        if _store is None:
            _store = attempt_store(self.launched_rank, self.launched_ranks, timeout)
        _opened += 1
        self._prefix = f"megatron_lossy/islands/{_opened}"
        own = torch.distributed.PrefixStore(f"{self._prefix}/{self.island}", _store)
        init_process_group(store=own, rank=self.rank, world_size=self.size, timeout=timeout)

    def store(self, name: str, rank: int | None = None) -> Any:
        """Return a store of the ranks with this one's place in every island, or with the place ``rank``. ``name``: its purpose, unique."""
        place = self.rank if rank is None else rank
        return torch.distributed.PrefixStore(f"{self._prefix}/meet/{place}/{name}", _store)


class ElasticWorld:
    """The place of this rank in island ``island`` of ``islands`` slots.

    ``rank``, ``size``: within the island, which is the launch. ``launched_rank``: its number if all slots were one launch.
    ``seed``: for the exchanges, the same for all.
    """

    def __init__(self, islands: int, island: int, seed: int = 0) -> None:
        self.islands, self.island, self.seed = islands, island, seed
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.launched_rank = island * self.size + self.rank
        self.job = island, islands
        #: By flag, what all islands must have alike.
        self.alike: Mapping[str, str] = {}

    def tell_environment(self) -> None:
        """Do nothing: the environment is that of the island already."""

    def compare(self, settings: Mapping[str, str]) -> None:
        """See :class:`.base.jobs.World`. They are compared once islands meet."""
        self.alike = settings

    def open(self, init_process_group: Callable[..., Any], timeout: timedelta) -> None:
        """Make the launch the default world."""
        if "RANK" in os.environ:
            init_process_group(timeout=timeout)
        else:
            init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=timeout)


class Stopping:
    """The knowledge of one rank of ``world`` about stopping. The first ranks of all islands agree in the store, on threads.

    Iterations are counted from 1, beginning where this process began; all islands begin alike.
    """

    def __init__(self, world: IslandWorld) -> None:
        self._number = 0  # the signal to stop, as far as it is known here; 0: none
        self._changed = threading.Condition()
        self._begun = 0
        self._over = False
        self._most: int | None = None  # iterations that may begin before the last one is known
        self._last: int | None = None
        self._error: BaseException | None = None
        self._store, self._island, self._islands = world.store("stop", 0), world.island, world.islands
        self._thread = threading.Thread(target=self._run, name="megatron-lossy-stop", daemon=True)
        self._first = world.rank == 0
        if self._first:
            self._thread.start()

    def stop(self, number: int) -> None:
        """Note that ``number`` is a signal to stop. May be called on any thread."""
        with self._changed:
            self._number = max(self._number, number)
            self._changed.notify_all()

    def begin(self) -> tuple[int, int]:
        """Begin the next iteration. Return the signal and the last iteration, each 0 if not known.

        Waits if the iteration could be later than the last one. Raise errors between islands.
        """
        with self._changed:
            self._begun += 1
            while self._most is not None and self._begun > self._most and self._last is None and self._error is None:
                self._changed.wait()
            self._check()
            return self._number, self._last or 0

    def leave(self) -> None:
        """Wait, after the last iteration, until all islands are there: they may still need data from this one."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._first:
            self._thread.join()
            self._check()
        with contextlib.suppress(torch.distributed.DistError):  # the serving rank leaves when all are there
            self._wait_for("over")

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._agree()
            with self._changed:
                self._changed.wait_for(lambda: self._over)
            self._store.set(f"over/{self._island}", "")
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _agree(self) -> None:
        while not self._number and not self._over:
            if self._store.check(["stop"]):
                self.stop(int(self._store.get("stop")))
            with self._changed:
                self._changed.wait_for(lambda: self._number or self._over, _LOOK)
        with self._changed:
            self._most, number = self._begun, self._number
            last = self._begun if self._over else self._begun + 1  # the next one begins once all ranks can have it
        if number:
            self._store.set("stop", str(number))
        self._store.set(f"last/{self._island}", f"{last} {number}")
        self._wait_for("last")
        found = [self._store.get(f"last/{island}").decode().split() for island in range(self._islands)]
        with self._changed:
            self._number = max(int(number) for _, number in found)
            self._last = max(int(last) for last, _ in found)
            self._changed.notify_all()

    def _wait_for(self, what: str) -> None:
        while not self._store.check([f"{what}/{island}" for island in range(self._islands)]):
            time.sleep(_LOOK)
