"""A store for the ranks of one attempt alone, if torchrun keeps one store for all attempts.

torchrun serves a store in its own process, unless an option forbids it (its static rendezvous, that of
``--master-addr``, has none). It starts dead ranks again, but the keys of the dead stay. Among them are the addresses at
which process groups of the same names would look for each other. Torch does not distinguish attempts (2.13,
``rendezvous.py``), and torchrun's count of restarts does not either: each node has one of its own, and a node that
joins restarts the others without counting.

So the ranks draw a name for their attempt, and write below it.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

_KEY = "megatron_lossy/attempt"
_names: list[str] = []  # of this process's stores; all below the first, which its attempt has


def attempt_store(rank: int, ranks: int, timeout: timedelta) -> torch.distributed.Store:
    """Return a new store of the ranks of this attempt. A collective call of all; it fails after ``timeout``."""
    store, *_ = next(rendezvous("env://", rank, ranks, timeout=timeout))
    store.set_timeout(timeout)
    if not _outlives_ranks():
        return store
    if not _names:
        _names.append(_name_attempt(store, ranks, timeout) if rank == 0 else _learn_name(store, rank, timeout))
    else:
        _names.append(f"{_names[0]}/{len(_names)}")
    return torch.distributed.PrefixStore(f"{_KEY}/{_names[-1]}", store)


def with_attempt_store(options: dict[str, Any]) -> dict[str, Any]:
    """Return ``options`` of ``init_process_group`` with this attempt's store, if torch would share one."""
    if not _outlives_ranks() or options.get("store") is not None or options.get("init_method") not in (None, "env://"):
        return options
    timeout = options.get("timeout") or torch.distributed.constants.default_pg_timeout
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return options | {
        "rank": rank,
        "world_size": ranks,
        "store": attempt_store(rank, ranks, timeout),
        "init_method": None,
    }


def _outlives_ranks() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# Any entry in the store may come from dead ranks. Only an entry with a number that a living rank has just drawn comes
# from living ones: rank 0 asks with one, the others answer with it and one of their own, and rank 0 begins with those.


def _name_attempt(store: torch.distributed.Store, ranks: int, timeout: timedelta) -> str:
    """Wait on rank 0 for an answer of each other rank, and send them the name of the attempt."""
    name = os.urandom(8).hex()
    store.set(f"{_KEY}/asked", name)
    missing = set(range(1, ranks))
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        missing -= {rank for rank in missing if _answer(store, rank)[0] == name}
        if not missing:
            break
        if time.monotonic() > deadline:
            raise torch.distributed.DistStoreError(
                f"rank{'s'[: len(missing) != 1]} {', '.join(map(str, sorted(missing)))} did not come within "
                f"{timeout.total_seconds():g} s"
            )
        time.sleep(0.02)
    for rank in range(1, ranks):
        store.set(f"{_KEY}/begin/{_answer(store, rank)[1]}", name)
    return name


def _answer(store: torch.distributed.Store, rank: int) -> tuple[str, str]:
    key = f"{_KEY}/answer/{rank}"
    asked, _, drawn = store.get(key).decode().partition(" ") if store.check([key]) else ("", "", "")
    return asked, drawn


def _learn_name(store: torch.distributed.Store, rank: int, timeout: timedelta) -> str:
    """Answer rank 0, again while nothing follows: the question may come from dead ranks."""
    drawn, patience = os.urandom(8).hex(), 0.1
    begin = f"{_KEY}/begin/{drawn}"
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        store.set(f"{_KEY}/answer/{rank}", f"{store.get(f'{_KEY}/asked').decode()} {drawn}")
        try:
            store.wait([begin], timedelta(seconds=patience))
        except torch.distributed.DistStoreError:
            patience = min(2 * patience, 2.0)
        else:
            return store.get(begin).decode()
    raise torch.distributed.DistStoreError(f"rank 0 did not come within {timeout.total_seconds():g} s")
