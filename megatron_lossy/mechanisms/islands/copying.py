"""Copies of the state of a rank, from a sender to who comes back: main weights, moments and step counts as of one exchange.

They cross by the connections of the exchanges, in parts, each tensor with a digest. They are never drawn as lost. Learning rates and
weight decay are not copied: they follow the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import torch

from ...base.fetch import Fetched
from .vector import Vector

#: Bytes that cross at once: the patience is for so many.
PART = 2**20
_DIGEST_BYTES = 16
#: Step counts that some optimizers keep in their groups, and others beside the moments.
_STEP = "step"


class Copy(NamedTuple):
    """The state of a rank. ``values``: by name, tensors in host memory and numbers. ``made``: iterations of the run before it."""

    values: dict[str, torch.Tensor | float]
    made: int
    #: 32 hexadecimal digits: of all values.
    digest: str


class Held:
    """``value`` as it is now, on its way to the host. On CUDA it takes no memory of the device."""

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach().contiguous()
        self.like = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        # Where a copy waits for the queued work, it must not see later work.
        value = value if value.device.type == "cuda" else value.clone()
        self._fetched = Fetched(_bytes(value))

    def bytes(self) -> torch.Tensor:
        """uint8[n], once it is here."""
        return torch.from_numpy(self._fetched.wait())


class Damaged(RuntimeError):
    """A tensor is not what was sent."""


class Pair(Protocol):
    """The two ends of a copy. Data is uint8[n], n at most :data:`PART`. Raises :class:`RuntimeError` if the other is gone."""

    def send(self, data: torch.Tensor) -> None:
        """Send ``data``."""

    def receive(self, data: torch.Tensor) -> None:
        """Receive into ``data``."""


def send_copy(pair: Pair, values: dict[str, Held | float], made: int) -> str:
    """Send ``values``, of a rank of a run that has made ``made`` iterations. Returns their digest."""
    items: list[dict[str, Any]] = []
    for name, value in values.items():
        what = {**value.like, "digest": _digest(value.bytes())} if isinstance(value, Held) else {"value": value}
        items.append({"name": name, **what})
    header = torch.frombuffer(bytearray(json.dumps({"made": made, "items": items}).encode()), dtype=torch.uint8)
    _send(pair, _bytes(torch.tensor([len(header)])))
    _send(pair, header)
    for value in values.values():
        if isinstance(value, Held):
            _send(pair, value.bytes())
    return _digest(header)


def receive_copy(pair: Pair) -> Copy:
    """The values that :func:`send_copy` sends. Raises :class:`Damaged`, and :class:`RuntimeError` if the other is gone."""
    length = torch.zeros(1, dtype=torch.int64)
    _receive(pair, _bytes(length))
    header = torch.empty(int(length), dtype=torch.uint8)
    _receive(pair, header)
    said = json.loads(header.numpy().tobytes())
    values: dict[str, torch.Tensor | float] = {}
    for item in said["items"]:
        name = item["name"]
        if "value" in item:
            values[name] = item["value"]
            continue
        value = torch.empty(item["shape"], dtype=getattr(torch, item["dtype"]))
        _receive(pair, _bytes(value))
        if _digest(_bytes(value)) != item["digest"]:
            raise Damaged(f"{name} is not what was sent")
        values[name] = value
    return Copy(values, said["made"], _digest(header))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    """uint8[n] of a contiguous tensor, in its memory."""
    return value.view(-1).view(torch.uint8)


def _send(pair: Pair, data: torch.Tensor) -> None:
    for first in range(0, len(data), PART):
        pair.send(data[first : first + PART])


def _receive(pair: Pair, data: torch.Tensor) -> None:
    for first in range(0, len(data), PART):
        pair.receive(data[first : first + PART])


def _digest(data: torch.Tensor) -> str:
    return blake2b(data.numpy(), digest_size=_DIGEST_BYTES).hexdigest()


def held_state(vectors: Sequence[Vector], optimizers: Sequence[Any]) -> dict[str, Held | float]:
    """The state as it is now. ``vectors``: main weights; ``optimizers``: torch's, in the same order."""
    found: dict[str, Held | float] = {}
    for number, (vector, optimizer) in enumerate(zip(vectors, optimizers, strict=True)):
        found[f"{number}/weights"] = _held(vector.read(None))
        state = optimizer.state_dict()
        for index, kept in state["state"].items():
            found |= {
                f"{number}/state/{index}/{name}": _held(value) for name, value in kept.items() if value is not None
            }
        for index, group in enumerate(state["param_groups"]):
            if _STEP in group:
                found[f"{number}/groups/{index}/{_STEP}"] = _held(group[_STEP])
    return found


def put_state(vectors: Sequence[Vector], optimizers: Sequence[Any], values: Mapping[str, torch.Tensor | float]) -> None:
    """Put ``values``, a :func:`held_state`, in the place of the weights and of the optimizers' state."""
    for number, (vector, optimizer) in enumerate(zip(vectors, optimizers, strict=True)):
        weights = values[f"{number}/weights"]
        assert isinstance(weights, torch.Tensor), number
        with torch.no_grad():
            vector.write(None, weights)
        own = optimizer.state_dict()
        state: dict[int, dict[str, Any]] = {}
        for name, value in values.items():
            of, *path = name.split("/")
            if int(of) != number:
                continue
            if path[0] == "state":
                state.setdefault(int(path[1]), {})[path[2]] = value
            elif path[0] == "groups":
                own["param_groups"][int(path[1])][path[2]] = value
        # What is loaded is kept: it must not be what others have.
        optimizer.load_state_dict({**own, "state": state})


def _held(value: Any) -> Held | float:
    return Held(value) if isinstance(value, torch.Tensor) else value
