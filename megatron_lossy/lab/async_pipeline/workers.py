"""Real ranks of an asynchronous pipeline: an endless 1F1B in the place of Megatron's schedule (docs/async_pipeline.md).

A stage depends on others only by their messages. Megatron does some work over all stages: the gradient's norm,
clipping, and the number of tokens. Here each stage does it for itself. Between iterations no message is under way, and
the model has the newest weights, so that evaluating and saving need no drain.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.pipeline_parallel.schedules import forward_step as megatron_forward_step

from ...base import device
from ...hooks.rng import on_cpu, rng_state, set_rng_state
from ...hooks.versions import backward_step, optimizers
from ...run.base import Run
from ...run.mechanism import Part
from ..train.config import TrainConfig
from ..train.data import RankBatches
from ..train.model import forward_step
from ..train.workers import Begun, Workers
from .stage import Pass, Stage, StageMessages, Stash, Version


@dataclass
class _PendingBatch:
    """A micro-batch between forward and backward pass. ``drawn_from``: the earlier random state, if it is saved."""

    input: torch.Tensor | None
    output: torch.Tensor
    tokens: torch.Tensor
    version: Version | None
    drawn_from: dict[str, Any] | None


class StageWorkers(Workers, Part):
    """The one worker of this rank: a stage of an asynchronous pipeline, with the work that is under way."""

    name = "async-pipeline"

    def __init__(self, config: TrainConfig, model_chunks: list, run: Run) -> None:
        super().__init__(config, model_chunks, run)
        run.add_part(self)
        [self._chunk] = model_chunks
        self._megatron = self._chunk.config
        group = parallel_state.get_pipeline_model_parallel_group()
        self._stage = Stage(group.rank(), group.size())
        self._micro_batches = self._micro_batches_of(config.global_batch_size)
        # The first stage ends a micro-batch that many backward passes after the last one. The last must not wait.
        self.late = max(1, math.ceil((self._stage.stages - 1) / self._micro_batches))
        shape = (config.seq_length, config.micro_batch_size, config.hidden_size)
        self._messages = StageMessages(shape, self._megatron.pipeline_dtype)
        self._stash = Stash(self._chunk.module.parameters())
        self._stashes = self._stage.delay > 0
        self._saves_draws = run.config.save_replicas and self._draws
        self._iteration = 0
        self._under_way: deque[_PendingBatch] = deque()
        self._restored: dict[str, Any] | None = None
        # A stage measures its own gradients.
        if config.use_distributed_optimizer:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        else:  # all ranks have all of the gradient
            group = parallel_state.get_tensor_model_parallel_group()
        for optimizer in optimizers(self.optimizer):
            optimizer.grad_stats_parallel_group = group

    def training_batches(self, dataset: GPTDataset, iteration: int, consumed: int) -> list[RankBatches]:
        self._iteration = iteration
        return super().training_batches(dataset, iteration, consumed)

    def iterate(
        self, batches: list[RankBatches], begin: Callable[[list[torch.Tensor]], Begun]
    ) -> tuple[Begun, bool, float]:
        self._chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums, tokens = self._passes(batches[0])
        self._megatron.finalize_model_grads_func([self._chunk], None)
        if self._config.calculate_per_token_loss:
            # Megatron asks the last stage for the number of tokens. Here each stage has counted those of its batch.
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            torch.distributed.all_reduce(tokens, group=group)
            if tokens > 0:
                self._chunk.scale_gradients(1.0 / tokens)
        begun = begin(sums)
        with self._stash.updating():
            successful, grad_norm, _ = self.step()
        if successful:
            self.scheduler.step(increment=self._config.global_batch_size)
        self._iteration += 1
        self._messages.settle()
        return begun, successful, grad_norm or 0.0

    def _passes(self, batches: RankBatches) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Make all passes of an iteration. Return (sum of losses, tokens) on the last stage, and the tokens on any."""
        newest: Version | None = None
        losses: list[torch.Tensor] = []
        tokens = torch.zeros([], dtype=torch.int, device=device.current_device())
        if self._restored is not None:
            self._recompute(self._restored, batches)
            self._restored = None
        forwarded = self._iteration + len(self._under_way) // self._micro_batches
        received = forwarded + len(self._messages.waiting) // self._micro_batches
        for step in self._stage.passes(
            self._iteration, self._config.train_iters, self._micro_batches, forwarded, received
        ):
            if step.kind == "receive":
                self._messages.begin_input()
            elif step.kind == "forward":
                if newest is None and self._stashes:
                    newest = self._stash.newest()
                activations = None if self._stage.first else self._messages.next_input()
                passed = self._forward(step.micro, activations, newest, batches, losses)
                if not self._stage.last:
                    self._messages.send(passed.output, self._messages.next)
                self._under_way.append(passed)
            else:
                tokens += self._backward(step)
        return [torch.stack(losses).sum(0)] if losses else [], tokens

    def _forward(
        self,
        micro: int,
        received: torch.Tensor | None,
        version: Version | None,
        batches: RankBatches,
        losses: list[torch.Tensor],
    ) -> _PendingBatch:
        drawn_from = None
        if self._saves_draws:  # of which layers draw from these
            drawn_from = {name: value for name, value in rng_state().items() if name in ("torch", "tracker", "device")}
        batch = next(batches)
        with self._stash.using(version):
            output, _ = megatron_forward_step(
                forward_step,
                iter([batch]),
                self._chunk,
                self._micro_batches,
                received,
                losses,
                self._megatron,
                cp_group_size=1,
                is_first_microbatch=micro == 0,
                current_microbatch=micro,
                is_last_stage=self._stage.last,
            )
        return _PendingBatch(received, output, batch["loss_mask"].sum().to(torch.int), version, drawn_from)

    def _backward(self, step: Pass) -> torch.Tensor:
        """Make the backward pass of the oldest micro-batch; returns its tokens."""
        passed = self._under_way.popleft()
        gradient = None if self._stage.last else self._messages.gradient()
        no_sync = self._megatron.no_sync_func if step.micro + 1 < self._micro_batches else None
        with (no_sync or contextlib.nullcontext)(), self._stash.using(passed.version):
            input_gradient = backward_step(passed.input, passed.output, gradient, self._megatron)
        if not self._stage.first:
            self._messages.send(input_gradient, self._messages.previous)
        if passed.version is not None and not any(other.version is passed.version for other in self._under_way):
            self._stash.release(passed.version)
        return passed.tokens

    def begin_norm(self, grad_norm: float) -> Callable[[], float]:
        """Begin to add up the norms of the stages, a collective call. Return a function that waits for the sum."""
        if self._stage.stages == 1:
            return lambda: grad_norm
        first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_data_parallel_rank() == 0
        square = torch.full((1,), grad_norm**2 if first else 0.0, device=device.current_device())  # not copied there
        work = torch.distributed.all_reduce(square, async_op=True)

        def finish() -> float:
            work.wait()
            return square.sqrt().item()

        return finish

    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batches under way between iterations, and their weights."""
        versions: list[Version] = []
        for passed in self._under_way:
            if passed.version is not None and passed.version not in versions:
                versions.append(passed.version)
        return {
            "micro batches": self._micro_batches,
            "versions": [self._stash.state_dict(version) for version in versions],
            "under way": [
                {
                    "input": None if passed.input is None else passed.input.detach(),
                    "version": None if passed.version is None else versions.index(passed.version),
                    "drawn from": passed.drawn_from,
                }
                for passed in self._under_way
            ],
            "received": self._messages.waiting,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`. The forward passes are computed again when the next iteration begins."""
        self._restored = state

    def _recompute(self, state: dict[str, Any], batches: RankBatches) -> None:
        versions = [self._stash.restored(flats) for flats in state["versions"]]
        now = rng_state()  # the state after the last forward pass must be this one again
        for number, saved in enumerate(state["under way"]):
            if saved["drawn from"] is not None:
                set_rng_state(now | on_cpu(saved["drawn from"]))
            received = None if saved["input"] is None else saved["input"].requires_grad_()
            version = None if saved["version"] is None else versions[saved["version"]]
            self._under_way.append(self._forward(number % state["micro batches"], received, version, batches, []))
        self._messages.restore(state["received"])
