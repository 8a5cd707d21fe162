"""Lossy boundaries between pipeline stages: lost packets of received messages become zeros (docs/boundaries.md).

Every message between stages passes ``_p2p_ops`` or ``_batched_p2p_ops`` of Megatron's ``p2p_communication``, which
``_communicate`` looks up by name. Messages from the previous stage are activations, those from the next one
gradients. Senders need no draw, and nothing more is sent. With one stage, forward hooks of decoder layers do the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from ...base.errors import UsageError
from ...base.ledger import Patch, Signature
from ...config import LossyConfig
from ...hooks.facts import of_communicator
from ...hooks.versions import data_parallel_rank, decoder_layers, innermost, schedule_table, sequence_parallel_rank
from ...run.base import Run
from ...transport import Transfer
from .events import Crossed
from .loss import Boundary, Fate
from .messages import Message, Messages, order
from .zero_fill import changes_nothing, elements_of, lossy, zero_fill_, zero_filled

_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_OPS = Signature(
    named=(
        "tensor_send_prev",
        "tensor_recv_prev",
        "tensor_send_next",
        "tensor_recv_next",
        "group",
        "prev_pipeline_rank",
        "next_pipeline_rank",
    ),
    others=(),
)
#: Kinds of Megatron's schedules for several stages.
_PIPELINED = ("with_interleaving", "without_interleaving")


class _Schedule:
    """One run of a schedule: its model chunks, and the order of their messages by phase."""

    def __init__(self, chunks: Sequence[torch.nn.Module], micro_batches: int, forward_only: bool) -> None:
        self.chunks = chunks
        self.micro_batches = micro_batches
        self.forward_only = forward_only
        self._order: dict[str, Iterator[tuple[int, int]]] = {}

    def next(self, phase: str, stage: int, stages: int) -> int:
        """Return the number of the model chunk whose message arrives next at pipeline rank ``stage`` of ``stages``."""
        if len(self.chunks) == 1:
            return 0
        if phase not in self._order:
            table = schedule_table(self.chunks, self.micro_batches, stages)
            self._order[phase] = iter(order(phase, table, stage == 0, stage == stages - 1))
        return next(self._order[phase])[1]


class Boundaries:
    """The boundaries of one process.

    ``run``: the real or virtual run that has them. ``on_one_node(peer)``: whether nothing is lost between this rank
    and the global rank ``peer``.
    """

    def __init__(self, run: Run, on_one_node: Callable[[int], bool] = lambda peer: False) -> None:
        self.run = run
        self.on_one_node = on_one_node
        self.config: LossyConfig = run.config
        self.messages = Messages(run.config)
        self._schedule: _Schedule | None = None
        self._known: set[type] = {type(None)}  # of communicators

    def check(self, communicator: Any) -> None:
        """Raise :class:`UsageError` for a ``communicator`` of messages that cannot be; each kind is checked once."""
        if type(communicator) not in self._known:
            self.run.add_facts(of_communicator(communicator))
            self._known.add(type(communicator))

    @contextlib.contextmanager
    def schedule(self, model: Any, micro_batches: int, forward_only: bool) -> Iterator[None]:
        """Surround a run of a schedule over ``model``, in which messages are counted anew."""
        chunks = model if isinstance(model, list) else [model]
        self.messages.begin(self.run.iteration, micro_batches)
        outer, self._schedule = self._schedule, _Schedule(chunks, micro_batches, forward_only)
        try:
            yield
        finally:
            self._schedule = outer

    def loses(self) -> bool:
        """Return whether a message can lose packets now: in evaluation only with ``--act-loss-in-eval``."""
        return self.config.act_loss_in_eval or self._trains()

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and not (self._schedule is not None and self._schedule.forward_only)

    def _next(self, phase: str, boundary: Boundary, rank: int, tensor: int | None, packets: int) -> Fate:
        fate = self.messages.next(phase, boundary, rank, tensor or 0, self.run.iteration, packets)
        self.tell(self.identify(phase, boundary, rank, tensor), fate)
        return fate

    def identify(self, phase: str, boundary: Boundary, rank: int, tensor: int | None) -> Message:
        """Return the next message to be received at ``boundary``; see :class:`Message`."""
        evaluation = self._schedule is not None and not self._trains()
        return self.messages.identify(phase, boundary, rank, tensor, self.run.iteration, evaluation)

    def tell(self, message: Message, fate: Fate) -> None:
        """Pass the losses of a message to the observers."""
        event = Crossed(message, fate, self.config.delivery_log_bitmaps)
        for observer in self.run.observers:
            observer.happened(message.step, [event])

    # --- several stages ----------------------------------------------------------------------------------------------

    def chunk(self, phase: str, group: Any) -> int | None:
        """Return the model chunk whose message arrives next; ``None`` outside of a schedule, or without loss.

        ``group``: that of the pipeline. Raise :class:`UsageError` if a message of training that should lose packets
        crosses outside of a schedule.
        """
        if self._schedule is not None:
            return self._schedule.next(phase, group.rank(), group.size())
        if torch.is_grad_enabled() and not self.messages.loss[phase].lossless:
            raise UsageError(
                "--p-act and --p-act-grad: a message between stages was received outside of Megatron's schedules, "
                "so it has no number; use megatron.core.pipeline_parallel.schedules"
            )
        return None

    def module(self, chunk: int) -> Any:
        """Return the model chunk with number ``chunk`` of the schedule that runs."""
        assert self._schedule is not None
        return self._schedule.chunks[chunk]

    def receive(self, phase: str, tensor: torch.Tensor, group: Any, reliable: bool) -> Callable[[], None] | None:
        """Prepare to receive ``tensor`` in ``phase``; returns a function to call on its arrival, if packets are lost.

        ``group``: that of the pipeline. ``reliable``: nothing is lost between these two ranks.
        """
        chunk = self.chunk(phase, group)
        if chunk is None or reliable or self.messages.loss[phase].lossless or not self.loses():
            return None
        module = self.module(chunk)
        elements = elements_of(self.config.packet_bytes, tensor.dtype)
        fate = self._next(
            phase,
            boundary_of(phase, module, chunk, group.rank(), group.size()),
            data_parallel_rank(module),
            sequence_parallel_rank(module),
            -(-tensor.numel() // elements),
        )
        if changes_nothing(fate.lost, tensor.device):
            return None
        return partial(fill, tensor, phase, fate.lost, elements, self.config)

    # --- one stage ---------------------------------------------------------------------------------------------------

    def attach(self, model: torch.nn.Module, rank: Callable[[], int], stages: int | None = None) -> None:
        """Lose after the layers of ``--virtual-boundaries``. ``rank()``: the data-parallel rank that computes.

        ``stages``: pipeline ranks that would have the parts between the boundaries, in turns; default one each.
        """
        layers = decoder_layers(model)
        places = sorted(self.config.virtual_boundaries or ())
        for number, layer in enumerate(places, start=1):
            chunk, stage = divmod(number, stages or len(places) + 1)
            boundary = Boundary(stage, layer, len(layers), chunk)
            layers[layer - 1].register_forward_hook(partial(self._cross, boundary, rank))

    def _cross(self, boundary: Boundary, rank: Callable[[], int], layer: Any, inputs: Any, output: Any) -> Any:
        if not self.loses():
            return None
        hidden, *rest = output if isinstance(output, tuple) else (output,)
        elements = elements_of(self.config.packet_bytes, hidden.dtype)
        packets = -(-hidden.numel() // elements)
        crossing = {"act": True, "act-grad": self._trains()}
        lost = [
            self._next(phase, boundary, rank(), None, packets).lost
            if crossing[phase] and not loss.lossless
            else np.zeros(packets, dtype=bool)
            for phase, loss in self.messages.loss.items()
        ]
        hidden = lossy(hidden, *lost, elements)
        return (hidden, *rest) if isinstance(output, tuple) else hidden


def fill(tensor: torch.Tensor, phase: str, lost: np.ndarray, elements: int, config: LossyConfig) -> None:
    """Zero the ``lost`` packets bool[packets] of a received ``tensor``.

    The gradient of lost activations becomes zero too.
    """
    zero_fill_(tensor, lost, elements)
    if phase == "act":
        tensor.register_hook(lambda gradient: zero_filled(gradient, lost, elements))


def boundary_of(phase: str, module: torch.nn.Module, chunk: int, stage: int, stages: int) -> Boundary:
    """Return the boundary at which ``chunk`` of pipeline rank ``stage`` receives in ``phase``.

    Activations come from before its first layer, gradients from behind its last one. Raise :class:`UsageError` for a
    chunk in the middle of the pipeline that has no layers.
    """
    layers = module.config.num_layers
    numbers = [layer.layer_number for layer in decoder_layers(module)]
    if phase == "act":
        return Boundary(stage, numbers[0] - 1 if numbers else _edge(module), layers, chunk)
    wraps = stage == stages - 1
    behind = numbers[-1] if numbers else _edge(module)
    return Boundary(0 if wraps else stage + 1, behind, layers, chunk + wraps)


def _edge(module: Any) -> int:
    """Return number of layers before a chunk that has none: 0 at the start of the model, all at its end."""
    inner = innermost(module)
    if getattr(inner, "post_process", False):
        return module.config.num_layers
    if getattr(inner, "pre_process", False):
        return 0
    raise UsageError("--p-act and --p-act-grad: a pipeline stage in the middle has no decoder layers; give it one")


def p2p_ops(boundaries: Boundaries, original: Callable, **kwargs: Any) -> Any:
    """Wrap ``_p2p_ops`` and ``_batched_p2p_ops``: zeros lost packets of a received message once it is waited for."""
    fills: dict[str, Callable[[], None]] = {}
    for name, phase, peer in (
        ("recv_prev", "act", "prev_pipeline_rank"),
        ("recv_next", "act-grad", "next_pipeline_rank"),
    ):
        tensor = kwargs[f"tensor_{name}"]
        if tensor is not None:
            zeros = boundaries.receive(phase, tensor, kwargs["group"], boundaries.on_one_node(kwargs[peer]))
            if zeros is not None:
                fills[name] = zeros
    requests = original(**kwargs)
    if isinstance(requests, dict):
        return {name: Transfer(one, fills[name]) if name in fills else one for name, one in requests.items()}
    if fills:
        # They are waited for in order, and some backends return one for all.
        return [*requests[:-1], Transfer(requests[-1], lambda: [zeros() for zeros in fills.values()])]
    return requests


def schedule(boundaries: Boundaries, original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Wrap the functions of ``schedules``, which take keywords only."""
    boundaries.check(kwargs.get("p2p_communicator"))
    with boundaries.schedule(kwargs["model"], kwargs["num_microbatches"], kwargs.get("forward_only", False)):
        return original(*args, **kwargs)


def patches(boundaries: Boundaries) -> list[Patch]:
    """Return patches that lossy boundaries need in megatron-core."""
    virtual = boundaries.config.virtual_boundaries is not None
    kinds = (
        ["forward_backward_no_pipelining"]
        if virtual
        else [f"forward_backward_pipelining_{kind}" for kind in _PIPELINED]
    )
    return [
        *(
            Patch(
                target=f"{_SCHEDULES}:{kind}",
                around=partial(schedule, boundaries),
                why="counts messages between stages from the start of a schedule on",
                takes=Signature(named=("model", "num_microbatches", "forward_only")),
            )
            for kind in kinds
        ),
        *(
            Patch(
                target=f"{_P2P}:{name}",
                around=partial(p2p_ops, boundaries),
                why="zero-fills what is lost of a message between stages",
                takes=_OPS,
            )
            for name in (() if virtual else ("_p2p_ops", "_batched_p2p_ops"))
        ),
    ]
