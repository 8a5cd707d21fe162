"""Messages of islands that come and go, and copies: the state of a rank, from a sender to an island that comes back, as of one exchange.

A copy has main weights, moments and step counts. It crosses by the connections of the exchanges, in parts, each tensor with a digest. It is never drawn as lost. Learning rates and
weight decay are not copied: they follow the run. An entry names the islands that copy; the source of each is the next sender by slot. All ranks of an
island have their part of a copy, of the same sender as of the same exchange; until then the island listens.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base.errors import first_line
from ...config import LossyConfig
from ...transport.peers import bytes_of
from .flags import SYNC_PHASES
from .mean import Form
from .rounds import Rounds
from .vector import HostCopy

logger = logging.getLogger(__name__)

#: Sends uint8[n], or receives into it: n is :data:`PART` at most. Raises :class:`RuntimeError` if the other one is gone.
Carry = Callable[[torch.Tensor], None]
#: Bytes that cross at once: the patience is for so many.
PART = 2**20
_DIGEST_BYTES = 16
#: Begins the names of the state of rules.
_RULE = "rule/"
#: Messages besides exchanges, and the bytes that one may have.
_ROLES, _SIZES = ("entry", "copy", "whole"), (2**14, PART)


class Buckets:
    """The messages of two islands that come and go, by their numbers. ``most``: by shard, the most elements of an exchange."""

    def __init__(self, config: LossyConfig, most: Sequence[int]) -> None:
        form = Form(config)
        self.packet, self._lanes, self._islands = form.packet, config.lanes, config.islands
        flat = [form.flat(max(elements, 1)) for elements in most]
        cuts = [form.cut(form.share(count, senders)) for count in flat for senders in range(1, config.islands + 1)]
        self._items = [form.items(cut) for cut in cuts]
        unit = form.packet * form.dtype.itemsize
        exchanges = [(items * form.dtype.itemsize, unit) for items in self._items for _ in range(self._lanes)]
        parts = [(size, unit) for _ in _ROLES for size in _SIZES]
        self.sizes = dict.fromkeys(SYNC_PHASES, exchanges + parts)
        #: The units that must arrive, bool[2, units], of messages by number: of all but exchanges.
        self.must = {
            len(exchanges) + number: np.ones((2, -(-size // unit)), dtype=bool)
            for number, (size, _) in enumerate(parts)
        }
        #: Arguments of a channel, by name.
        self.named: dict[str, Any] = {
            "phases": SYNC_PHASES,
            "alike": repr((config.sync_subset, form.code)),
            "codes": form.codes,
            "reported": [(phase, number) for phase in SYNC_PHASES for number in self.must],
        }

    def exchange(self, shard: int, lane: int, senders: int) -> tuple[int, int]:
        """Return the number of an exchange's message to each of so many ``senders``, and its items."""
        place = shard * self._islands + senders - 1
        return place * self._lanes + lane, self._items[place]

    def part(self, role: str, size: int) -> tuple[int, int]:
        """Return the number of the shortest message of ``role`` with room for ``size`` bytes, and its bytes."""
        which = next(number for number, most in enumerate(_SIZES) if size <= most)
        return len(self._items) * self._lanes + _ROLES.index(role) * len(_SIZES) + which, _SIZES[which]


class Copy(NamedTuple):
    """The state of a rank. ``values``: by name, tensors in host memory and numbers. ``made``: iterations of the run before it."""

    values: dict[str, torch.Tensor | float]
    made: int
    #: 32 hexadecimal digits: of all values.
    digest: str


class DamagedCopy(RuntimeError):
    """A tensor is not what was sent."""


def send_copy(send: Carry, values: dict[str, HostCopy | float], made: int) -> str:
    """Send ``values``, of a rank of a run that has made ``made`` iterations. Return their digest."""
    items: list[dict[str, Any]] = []
    for name, value in values.items():
        what = {**value.like, "digest": _digest(value.bytes())} if isinstance(value, HostCopy) else {"value": value}
        items.append({"name": name, **what})
    header = torch.frombuffer(bytearray(json.dumps({"made": made, "items": items}).encode()), dtype=torch.uint8)
    _carry(send, bytes_of(torch.tensor([len(header)])))
    _carry(send, header)
    for value in values.values():
        if isinstance(value, HostCopy):
            _carry(send, value.bytes())
    return _digest(header)


def receive_copy(receive: Carry) -> Copy:
    """Return the values of :func:`send_copy`. Raise :class:`DamagedCopy`, or :class:`RuntimeError` if the other is gone."""
    length = torch.zeros(1, dtype=torch.int64)
    _carry(receive, bytes_of(length))
    header = torch.empty(int(length), dtype=torch.uint8)
    _carry(receive, header)
    said = json.loads(header.numpy().tobytes())
    values: dict[str, torch.Tensor | float] = {}
    for item in said["items"]:
        name = item["name"]
        if "value" in item:
            values[name] = item["value"]
            continue
        value = torch.empty(item["shape"], dtype=getattr(torch, item["dtype"]))
        _carry(receive, bytes_of(value))
        if _digest(bytes_of(value)) != item["digest"]:
            raise DamagedCopy(f"{name} is not what was sent")
        values[name] = value
    return Copy(values, said["made"], _digest(header))


def _carry(carry: Carry, data: torch.Tensor) -> None:
    for first in range(0, len(data), PART):
        carry(data[first : first + PART])


def _digest(data: torch.Tensor) -> str:
    return blake2b(data.numpy(), digest_size=_DIGEST_BYTES).hexdigest()


def held_state(rounds: Sequence[Rounds], optimizers: Sequence[Any]) -> dict[str, HostCopy | float]:
    """Return the state of an island as it is now: of the vector and the rule of each of ``rounds``, and of torch's ``optimizers``."""
    found: dict[str, HostCopy | float] = {}
    for number, (one, optimizer) in enumerate(zip(rounds, optimizers, strict=True)):
        found |= {f"{number}/{name}": value for name, value in one.vectors[0].held_state(optimizer).items()}
        found |= {f"{_RULE}{number}/{name}": HostCopy(kept[0]) for name, kept in one.rule.copied().items()}
    return found


def put_state(rounds: Sequence[Rounds], optimizers: Sequence[Any], values: Mapping[str, torch.Tensor | float]) -> None:
    """Put ``values``, a :func:`held_state`, in the place of the present state. Some ranks have no values."""
    for number, (one, optimizer) in enumerate(zip(rounds, optimizers, strict=True)):
        for name, kept in one.rule.copied().items() if values else ():
            kept[0] = torch.as_tensor(values[f"{_RULE}{number}/{name}"])
        prefix = f"{number}/"
        own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
        one.vectors[0].put_state(optimizer, own)


# --- on threads --------------------------------------------------------------------------------------------------------


def source_of(slot: int, senders: Sequence[int], islands: int) -> int:
    """Return the island that ``slot`` copies: the next of ``senders``."""
    return min(senders, key=lambda other: (other - slot) % islands)


class Rejoining:
    """The copies of rank ``rank`` of the island ``slot``. ``seconds``: for each part."""

    def __init__(self, slot: int, rank: int, seconds: float) -> None:
        self._slot, self._rank, self._seconds = slot, rank, seconds
        #: The copies that have come and their sources, by the number of the epoch that they were sent in.
        self.copies: dict[int, tuple[Copy, int]] = {}
        self._threads: list[threading.Thread] = []

    @property
    def came(self) -> int:
        """The number of the latest epoch of which a copy has come; -1: there is none."""
        return max(list(self.copies), default=-1)

    def take(self, epoch: int) -> tuple[Copy, int]:
        """Return the copy of the epoch number ``epoch`` and its source, and keep it no longer, nor older ones."""
        found = self.copies[epoch]
        for number in [earlier for earlier in self.copies if earlier <= epoch]:
            del self.copies[number]
        return found

    def receive(self, pair: Any, epoch: int) -> None:
        """Receive the copy of the source behind ``pair``, a :class:`.connections.Pair`, on a thread, as a member of the epoch number ``epoch``."""

        def run() -> None:
            # The source sends the first part at an exchange of the epoch.
            numbers, within = itertools.count(1), itertools.chain([math.inf], itertools.repeat(self._seconds))
            with pair.used():
                copy = receive_copy(lambda part: pair.get("copy", next(numbers), part, next(within)))
            self.copies[epoch] = copy, pair.slot

        self._begin(run, f"no copy of island {pair.slot}; it listens")

    def serve(self, pair: Any, values: dict[str, Any], made: int) -> None:
        """Send ``values``, the state after ``made`` iterations of the run, to the member behind ``pair``, on a thread."""

        def run() -> None:
            numbers = itertools.count(1)
            with pair.used():
                digest = send_copy(lambda part: pair.put("copy", next(numbers), part, self._seconds), values, made)
            ours = f"island {self._slot}: island {pair.slot} copies it"
            logger.warning("%s as of iteration %d, rank %d %s", ours, made, self._rank, digest)

        self._begin(run, f"island {pair.slot} does not get its copy")

    def _begin(self, run: Callable[[], None], failed: str) -> None:
        def guarded() -> None:
            try:
                run()
            except Exception as error:  # the other one is gone, or what came is damaged
                logger.warning("island %d: %s (%s)", self._slot, failed, first_line(error))

        self._threads.append(threading.Thread(target=guarded, name="megatron-lossy-copy", daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        """Wait for what is under way."""
        for thread in self._threads:
            thread.join(self._seconds)
