"""A small model of ``fully_shard`` on ranks, trained with and without loss, and what its exchanges carry."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from megatron_lossy.base import device
from megatron_lossy.base.exchange import units_of
from megatron_lossy.pytorch import make_lossy
from megatron_lossy.recovery import Gradients

TYPES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "all bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Tiny:
    """A residual network whose layers have odd sizes, so that shards need padding; and how it is trained.

    ``accumulation``: micro-batches of an update. ``synchronises``: each is reduced by itself, not only the last.
    """

    dtype: str = "fp32"
    reshard: bool | None = None
    accumulation: int = 1
    synchronises: bool = False
    prefetches: bool = False
    asynchronous: bool = False
    checkpoints: bool = False
    frozen: bool = False
    sums: bool = False
    divided: float | None = None  # by another number than that of ranks, which torch itself cannot do over gloo
    clips: bool = False
    replicas: int = 1  # of HSDP
    seed: int = 0
    device: str | None = None  # another than that of the rank

    @property
    def where(self) -> str:
        """The kind of device that it is trained on."""
        return self.device or device.device_type()


class Block(nn.Module):
    """One layer; it may be computed again in the backward pass."""

    def __init__(self, width: int, hidden: int, again: bool) -> None:
        super().__init__()
        self.up, self.down, self.again = nn.Linear(width, hidden), nn.Linear(hidden, width), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, width]."""
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x))

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output without the residual."""
        return self.down(torch.tanh(self.up(x)))


def build(tiny: Tiny, mesh: Any = None) -> nn.Module:
    """Return the model, sharded: three blocks by themselves, and the rest together."""
    torch.manual_seed(tiny.seed)
    model = nn.Sequential(
        nn.Linear(7, 11), *(Block(11, 5 + 2 * k, tiny.checkpoints) for k in range(3)), nn.Linear(11, 3)
    )
    model.to(tiny.where)
    if tiny.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up.weight" not in name and not name.startswith("2."))
    if tiny.replicas > 1:
        shards = dist.get_world_size() // tiny.replicas
        mesh = init_device_mesh(tiny.where, (tiny.replicas, shards), mesh_dim_names=("replicate", "shard"))
    if mesh is None:
        mesh = init_device_mesh(tiny.where, (dist.get_world_size(),))
    how = {"mesh": mesh, "mp_policy": TYPES[tiny.dtype], "reshard_after_forward": tiny.reshard}
    for block in model[1:4]:
        fully_shard(block, **how)
    fully_shard(model, **how)
    if tiny.prefetches:
        for block, following in itertools.pairwise(model[1:4]):
            block.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([block])
    if tiny.asynchronous:
        model._set_unshard_async_op(True)
    for module in (model, *model[1:4]) if tiny.sums else ():
        module.set_force_sum_reduction_for_comms(True)
    for module in (model, *model[1:4]) if tiny.divided is not None else ():
        module.set_gradient_divide_factor(tiny.divided)
    return model


class Training:
    """A model and its optimizer; ``config`` None leaves torch's exchanges alone."""

    def __init__(self, tiny: Tiny, config: Any, **how: Any) -> None:
        self.tiny = tiny
        self.model = build(tiny)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.lossy = None if config is None else make_lossy(self.model, self.optimizer, config, **how)

    def step(self, step: int) -> float:
        """Make one update; return the loss of its last micro-batch."""
        for part in range(self.tiny.accumulation):
            last = part == self.tiny.accumulation - 1
            self.model.set_requires_gradient_sync(last or self.tiny.synchronises)
            loss = self.loss(step * self.tiny.accumulation + part)
            loss.backward()
        if self.tiny.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def scaled_steps(self, scaler: Any, steps: int, overflows: tuple[int, ...]) -> list[int | None]:
        """Train with a loss scale, infinite losses at rank 0 in ``overflows``; return the update after each step."""
        updates = []
        for step in range(steps):
            for part in range(self.tiny.accumulation):
                loss = self.loss(step * self.tiny.accumulation + part)
                scaler.scale(loss * (torch.inf if step in overflows and dist.get_rank() == 0 else 1)).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
            updates.append(self.lossy.update)
        return updates

    def loss(self, number: int) -> torch.Tensor:
        """Return the loss of batch ``number`` of this rank."""
        chance = torch.Generator("cpu").manual_seed(1000 * number + dist.get_rank())
        x = torch.randn(6, 7, generator=chance, device="cpu").to(self.tiny.where)
        return (self.model(x) - x[:, :3].sin()).float().square().mean()

    def weights(self) -> dict[str, Any]:
        """Return the owners' weights, whole, and the optimizer's first moments."""
        whole = {name: one.full_tensor().detach().float().cpu().numpy() for name, one in self.model.named_parameters()}
        states = {
            f"{name} moment": self.optimizer.state[one]["exp_avg"].full_tensor().cpu().numpy()
            for name, one in self.model.named_parameters()
            if one in self.optimizer.state
        }
        return whole | states

    def replicas(self) -> list[Any]:
        """Return this rank's replicas of all buckets."""
        return [one.replica.float().cpu().numpy().copy() for one in self.lossy._gathers]


@contextlib.contextmanager
def trained(run: Any, steps: Iterable[int]) -> Iterator[list[float]]:
    """Train; yield the losses, and close afterwards what makes the run lossy."""
    yield [run.step(step) for step in steps]
    if run.lossy is not None:
        run.lossy.close()


def resumed(make: Callable[[], Any], again: Callable[[], Any], steps: int, of_first: bool = False) -> tuple[Any, Any]:
    """Return weights and losses of the run of ``again``, which makes ``steps`` after as many of that of ``make``.

    ``of_first``: all ranks load model and optimizer of the first.
    """
    run = make()
    with trained(run, range(steps)):
        saved = [run.model.state_dict(), run.optimizer.state_dict()]
        saved, mine = copy.deepcopy((saved, run.lossy.state_dict()))
    if of_first:
        dist.broadcast_object_list(saved, src=0)
    run = again()
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    run.lossy.load_state_dict(mine)
    with trained(run, range(steps, 2 * steps)) as losses:
        return run.weights(), losses


def plain(rank: int, tiny: Tiny, config: Any, steps: int) -> tuple[Any, Any]:
    """Return final weights, and losses."""
    run = Training(tiny, config)
    with trained(run, range(steps)) as losses:
        return run.weights(), losses


def record(rank: int, tiny: Tiny, config: Any, steps: int) -> list[dict[str, Any]]:
    """Train; one record per round of gradients of what entered and left each bucket, for :func:`tests.contract.check`."""
    run = Training(tiny, config)
    lossy = run.lossy
    sent: list[dict[int, Any]] = [{} for _ in lossy._lossy]
    for group, seen in zip(lossy._lossy, sent):
        _spy(group, seen)
    iterations = []
    for step in range(steps):
        lossy.settle()
        before = run.replicas() if lossy.update is not None else None
        first = lossy.iteration
        run.step(step)
        rounds = range(first, lossy.iteration)
        if before is None:
            before = run.replicas()  # the first gather is reliable
        lossy.settle()
        after = run.replicas()
        for one in rounds:
            last = one == rounds[-1]
            buckets = []
            for sharded, old, new in zip(lossy._gathers, before, after):
                number = lossy._lossy.index(sharded.lossy)
                entered, left = sent[number][one, sharded.number]
                buckets.append(
                    {**_place(sharded), "sent": entered, "reduced": left, "before": old, "after": new if last else old}
                )
            report = {"success": last, "used": True}
            iterations.append({"report": report, "update": lossy.update if last else None, "buckets": buckets})
    lossy.close()
    return iterations


def _spy(group: Any, seen: dict[tuple[int, int], Any]) -> None:
    """Keep what enters and leaves the reduce-scatters of ``group``, by step and bucket."""
    original = group.reduce_scatter

    def reduce_scatter(x: Gradients) -> Any:
        entered = x.buffer.float().cpu().numpy().copy()
        transfer = original(x)

        def keep(_: Any) -> None:
            seen[x.exchange.step, x.bucket] = entered, x.output.float().cpu().numpy().copy()

        return transfer.then(keep)

    group.reduce_scatter = reduce_scatter


def _place(sharded: Any) -> dict[str, Any]:
    lossy, number = sharded.lossy, sharded.number
    units = lossy.wire.cut
    return {
        "stream": lossy.stream,
        "number": number,
        "group": dist.get_process_group_ranks(sharded.group.ranks),
        "full": sharded.group.all_ranks,
        "shard": units["grad"][number].shard,
        "param_shard": units["param"][number].shard,
        "units": {phase: (cut[number].first, cut[number].elements) for phase, cut in units.items()},
        "totals": {phase: units_of(cut) for phase, cut in units.items()},
    }
