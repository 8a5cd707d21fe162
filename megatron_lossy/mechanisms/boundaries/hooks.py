"""Lossy boundaries between pipeline stages: lost packets of received messages become zeros (docs/boundaries.md).

Every message between stages passes ``_p2p_ops`` or ``_batched_p2p_ops`` of Megatron's ``p2p_communication``, which
``_communicate`` looks up by name. Messages from the previous stage are activations, those from the next one
gradients. Senders need no draw, and nothing more is sent. With one stage, forward hooks of decoder layers do the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...base.errors import UsageError
from ...base.ledger import Patch, Signature
from ...config import LossyConfig
from ...hooks.facts import of_communicator
from ...hooks.versions import (
    data_parallel_rank,
    decoder_layers,
    innermost,
    pipeline_ranks,
    schedule_table,
    sequence_parallel_rank,
)
from ...run.mechanism import Part
from ...run.monitor import Observer, Window
from ...transport import Transfer
from .flags import BOUNDARY_PHASES
from .messages import Boundary, Message, Messages, order
from .zero_fill import changes_nothing, elements_of, lossy, zero_fill_, zero_filled

logger = logging.getLogger(__name__)

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


class StageBoundaries(Part):
    """The boundaries of one process that lose messages (``--p-act``, ``--p-act-grad``): of a rank, or of virtual workers."""

    name = "boundaries"

    def attach(self, run: Any) -> None:
        self.run = run
        self.config: LossyConfig = run.config
        self.messages = Messages(run.config)
        self._schedule: _Schedule | None = None
        self._known: set[type] = {type(None)}  # of communicators
        if run.kind == "Megatron":
            run.events.on(chunk_comes=self.find_nodes)
        run.events.on(chunk_added=self.add_model_chunk)
        run.patches += patches(self)

    def find_nodes(self, ddp: Any) -> None:
        """Find the nodes of all ranks. A collective call."""
        # Over all ranks, so before anything that only some of them have.
        if not self.run.exchanges.find_nodes():
            return
        # The first rank of each pipeline says that none of its boundaries leaves a node.
        nodes, ranks = self.run.exchanges.nodes, pipeline_ranks()
        if len(ranks) > 1 and len({nodes[rank] for rank in ranks}) == 1 and ranks[0] == dist.get_rank():
            text = "nothing is lost between the stages on ranks %s: they are on one node (--lossy-links inter-node)"
            logger.warning(text, ranks)

    def add_model_chunk(self, ddp: Any) -> None:
        """Lose messages after layers of ``ddp``, if the boundaries are virtual."""
        if self.config.virtual_boundaries is not None:
            real = self.run.kind == "Megatron"
            self.add_layers(ddp, partial(data_parallel_rank, ddp) if real else lambda: self.run.rank)

    def loses(self) -> bool:
        """Return whether a message can lose packets now: in evaluation only with ``--act-loss-in-eval``."""
        return self.config.act_loss_in_eval or self._trains()

    def _trains(self) -> bool:
        return torch.is_grad_enabled() and not (self._schedule is not None and self._schedule.forward_only)

    def _lost(self, phase: str, boundary: Boundary, rank: int, tensor: int | None, packets: int) -> np.ndarray:
        """Return bool[packets]: the packets that the next message loses, which observers receive."""
        step, evaluation = self.run.iteration, self._schedule is not None and not self._trains()
        message = self.messages.next(phase, boundary, rank, tensor, step, packets, evaluation)
        for observer in self.run.observers:
            observer.happened(step, [message])
        return message.fate.lost

    # --- several stages ----------------------------------------------------------------------------------------------

    def run_schedule(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Wrap the functions of ``schedules``, which take keywords only: messages are counted anew.

        Raise :class:`UsageError` for a communicator of messages that cannot be.
        """
        communicator = kwargs.get("p2p_communicator")
        if type(communicator) not in self._known:
            self.run.add_facts(of_communicator(communicator))
            self._known.add(type(communicator))
        model, micro_batches = kwargs["model"], kwargs["num_microbatches"]
        chunks = model if isinstance(model, list) else [model]
        self.messages.begin(self.run.iteration, micro_batches)
        outer = self._schedule
        self._schedule = _Schedule(chunks, micro_batches, kwargs.get("forward_only", False))
        try:
            return original(*args, **kwargs)
        finally:
            self._schedule = outer

    def communicate(self, original: Callable, **kwargs: Any) -> Any:
        """Wrap ``_p2p_ops`` and ``_batched_p2p_ops``: zero lost packets of a received message once it is waited for."""
        fills: dict[str, Callable[[], None]] = {}
        for end, phase in (("prev", "act"), ("next", "act-grad")):
            tensor = kwargs[f"tensor_recv_{end}"]
            if tensor is not None:
                zeros = self._receive(phase, tensor, kwargs["group"], kwargs[f"{end}_pipeline_rank"])
                if zeros is not None:
                    fills[f"recv_{end}"] = zeros
        requests = original(**kwargs)
        if isinstance(requests, dict):
            return requests | {name: Transfer(requests[name], fill) for name, fill in fills.items() if name in requests}
        if fills:
            # They are waited for in order, and some backends return one for all.
            return [*requests[:-1], Transfer(requests[-1], lambda: [zeros() for zeros in fills.values()])]
        return requests

    def _receive(self, phase: str, tensor: torch.Tensor, group: Any, peer: int) -> Callable[[], None] | None:
        """Prepare to receive ``tensor`` in ``phase``; return a function to call on its arrival, if packets are lost.

        ``group``: that of the pipeline. ``peer``: the global rank of the sender. Raise :class:`UsageError` if a message
        of training that should lose packets crosses outside of a schedule.
        """
        lossless = self.messages.loss[phase].lossless
        if self._schedule is None:
            if torch.is_grad_enabled() and not lossless:
                raise UsageError(
                    "--p-act and --p-act-grad: a message between stages was received outside of Megatron's schedules, "
                    "so it has no number; use megatron.core.pipeline_parallel.schedules"
                )
            return None
        chunk = self._schedule.next(phase, group.rank(), group.size())
        if lossless or self.run.exchanges.on_one_node(peer) or not self.loses():
            return None
        module = self._schedule.chunks[chunk]
        elements = elements_of(self.config.packet_bytes, tensor.dtype)
        lost = self._lost(
            phase,
            boundary_of(phase, module, chunk, group.rank(), group.size()),
            data_parallel_rank(module),
            sequence_parallel_rank(module),
            -(-tensor.numel() // elements),
        )
        if changes_nothing(lost, tensor.device):
            return None
        return partial(_fill, tensor, phase, lost, elements)

    # --- one stage ---------------------------------------------------------------------------------------------------

    def add_layers(self, model: torch.nn.Module, rank: Callable[[], int], stages: int | None = None) -> None:
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
            self._lost(phase, boundary, rank(), None, packets)
            if crossing[phase] and not loss.lossless
            else np.zeros(packets, dtype=bool)
            for phase, loss in self.messages.loss.items()
        ]
        hidden = lossy(hidden, *lost, elements)
        return (hidden, *rest) if isinstance(output, tuple) else hidden


def _fill(tensor: torch.Tensor, phase: str, lost: np.ndarray, elements: int) -> None:
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


def patches(boundaries: StageBoundaries) -> list[Patch]:
    """Return patches that lossy boundaries need in megatron-core."""
    schedules, messages = ["forward_backward_no_pipelining"], []
    if boundaries.config.virtual_boundaries is None:
        schedules = [f"forward_backward_pipelining_{kind}" for kind in ("with_interleaving", "without_interleaving")]
        messages = ["_p2p_ops", "_batched_p2p_ops"]
    counts: dict[str, Any] = {
        "around": boundaries.run_schedule,
        "why": "counts messages between stages from the start of a schedule on",
        "takes": Signature(named=("model", "num_microbatches", "forward_only")),
    }
    why = "zero-fills what is lost of a message between stages"
    fills: dict[str, Any] = {"around": boundaries.communicate, "why": why, "takes": _OPS}
    return [
        *(Patch(target=f"{_SCHEDULES}:{name}", **counts) for name in schedules),
        *(Patch(target=f"{_P2P}:{name}", **fills) for name in messages),
    ]


# --- metrics ---------------------------------------------------------------------------------------------------------

_COLUMNS = ("packets", "raw", "zeros", "messages", "again")


class BoundaryMonitor(Observer):
    """Metrics of all messages between stages since the last record, over all ranks."""

    def __init__(self) -> None:
        self._window = Window([f"{phase} {column}" for phase in BOUNDARY_PHASES for column in _COLUMNS])

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        for event in what:
            if isinstance(event, Message):
                fate, phase = event.fate, event.phase
                counts = (fate.lost.size, fate.raw, int(fate.lost.sum()), 1, fate.again)
                self._window.add(**{f"{phase} {column}": value for column, value in zip(_COLUMNS, counts)})

    def metrics(self) -> dict[str, float]:
        total = self._window.close()
        result = {}
        for phase in BOUNDARY_PHASES:
            packets, raw, zeros, messages, again = (total[f"{phase} {column}"] for column in _COLUMNS)
            if messages:
                result[f"loss rate {phase}"] = raw / packets
                result[f"zero share {phase}"] = zeros / packets
                result[f"retransmitted share {phase}"] = again / messages
        return result
