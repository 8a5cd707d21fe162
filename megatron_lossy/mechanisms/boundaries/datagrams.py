"""``--act-transport udp``: messages between stages in different nodes cross as datagrams (docs/boundaries.md#over-udp).

Our requests replace Megatron's, which waits for them in the same way. Messages within a node, and those outside of
schedules, stay Megatron's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ...hooks.versions import data_parallel_rank, sequence_parallel_rank, tensor_group
from ...transport import Transfer
from .hooks import Boundaries, boundary_of, fill
from .links import StageLinks, lost_by_any
from .loss import Fate
from .zero_fill import changes_nothing, elements_of

#: Name, phase, the other rank, and whether this one sends. Sends come first: a link opens when both ranks begin.
_WAYS = (
    ("send_next", "act", "next_pipeline_rank", True),
    ("send_prev", "act-grad", "prev_pipeline_rank", True),
    ("recv_prev", "act", "prev_pipeline_rank", False),
    ("recv_next", "act-grad", "next_pipeline_rank", False),
)
_OPPOSITE = {"act": "act-grad", "act-grad": "act"}


def p2p_ops(boundaries: Boundaries, original: Callable, **kwargs: Any) -> Any:
    """Wrap ``_p2p_ops`` and ``_batched_p2p_ops``: messages that leave the node use the links of this process."""
    far: dict[str, Callable[[], Any]] = {}
    for name, phase, whose, sends in _WAYS:
        tensor, peer, group = kwargs[f"tensor_{name}"], kwargs[whose], kwargs["group"]
        if tensor is None:
            continue
        chunk = boundaries.chunk(phase, group, sends)
        if chunk is not None and not boundaries.on_one_node(peer):
            begin = _send if sends else _receive
            far[name] = partial(begin, boundaries, phase, tensor, peer, group, chunk)
            kwargs[f"tensor_{name}"] = None
    near = original(**kwargs)
    begun = {name: begin() for name, begin in far.items()}
    return near | begun if isinstance(near, dict) else [*near, *begun.values()]


def _links(boundaries: Boundaries) -> StageLinks:
    assert boundaries.links is not None, "no model chunk was wrapped"
    return boundaries.links


def _packet(boundaries: Boundaries, tensor: torch.Tensor) -> tuple[int, int]:
    """Return elements and bytes of a packet."""
    elements = elements_of(boundaries.config.packet_bytes, tensor.dtype)
    return elements, elements * tensor.element_size()


def _varies(module: Any) -> bool:
    """Return whether messages differ in length. Megatron sends the shape before, so both ranks have the length."""
    return bool(getattr(module.config, "variable_seq_lengths", False))


def _send(boundaries: Boundaries, phase: str, tensor: torch.Tensor, peer: int, group: Any, chunk: int) -> Any:
    # A chunk's output crosses the boundary at which it receives gradients.
    module = boundaries.module(chunk)
    boundary = boundary_of(_OPPOSITE[phase], module, chunk, group.rank(), group.size())
    code = boundaries.messages.loss[phase].code(boundary) or (1, 0)
    packet = _packet(boundaries, tensor)[1]
    return _links(boundaries).send(phase, tensor.contiguous(), peer, packet, code, _varies(module))


def _receive(boundaries: Boundaries, phase: str, tensor: torch.Tensor, peer: int, group: Any, chunk: int) -> Transfer:
    module, loss = boundaries.module(chunk), boundaries.messages.loss[phase]
    elements, packet = _packet(boundaries, tensor)
    packets = -(-tensor.numel() // elements)
    tolerance, dropped, peers = 0, None, None
    loses = boundaries.loses()
    if loses:
        boundary = boundary_of(phase, module, chunk, group.rank(), group.size())
        rank, peers = data_parallel_rank(module), tensor_group(expert=False)
        message = boundaries.identify(phase, boundary, rank, None if peers is None else peers.rank())
        # Tensor-parallel ranks that get the same message lose a packet if any of them lost it. Each may lose its part
        # of the bound.
        peers = None if module.config.sequence_parallel else peers
        tolerance = loss.bound(boundary, packets)
        if peers is not None and tolerance < packets:
            tolerance //= peers.size()
        if not loss.lossless:
            place = (rank, sequence_parallel_rank(module) or 0, boundaries.run.iteration, packets)
            dropped = boundaries.messages.lost(phase, boundary, *place)
    coming = _links(boundaries).receive(phase, tensor, peer, packet, tolerance, dropped, _varies(module))

    def arrived() -> None:
        received = coming()
        if not loses:
            return
        lost = ~received.arrived
        if peers is not None and tolerance:
            lost = lost_by_any(lost, peers)
        boundaries.tell(message, Fate(lost, *received.outcome))
        if not changes_nothing(lost, tensor.device):
            fill(tensor, phase, lost, elements, boundaries.config)

    return Transfer(None, arrived)
