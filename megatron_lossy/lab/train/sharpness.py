"""Sharpness: how large steps of the learning rate are for the curvature of the loss (docs/monitors.md).

Along a direction in which the preconditioned Hessian has the eigenvalue h, Adam with learning rate lr is stable up to a
limit of lr h that lost parameters lower (:func:`megatron_lossy.lab.theory.stability_limit`). Measured is the largest eigenvalue of
P^1/2 H P^1/2. H is the Hessian of the loss of one global batch at the owners' weights, and P = 1 / (sqrt(v) + eps) with Adam's
second moment v.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from ...base.exchange import Exchange
from ...hooks.versions import innermost, optimizers
from ...run.base import Run
from ..theory import Lag, Lead, lead, mean_lag, stability_limit
from .config import TrainConfig
from .data import RankBatches
from .model import forward_step, sum_of_losses
from .optimizer import lr_scale
from .workers import evaluating

#: Products with the Hessian of the first measurement, and of each that begins with the vector of the one before.
FIRST, LATER = 12, 4
#: Length of the step to both sides of the weights, over that of the weights.
STEP = 1e-3
_SEED = 20261125

Tensors = Sequence[torch.Tensor]


def largest_eigenvalue(
    product: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor, products: int
) -> tuple[float, torch.Tensor]:
    """Return the largest eigenvalue of a symmetric matrix by ``products`` of it, and a vector of length 1 for it.

    ``product``: multiplies [n] by the matrix. The eigenvalue is the largest on the space of ``start``, ``product(start)``, … (that
    of Lanczos): never above the true one, and never below what as many power iterations find. NaN if a product is not finite.
    """
    basis: list[torch.Tensor] = []
    small = np.zeros((products, products))  # the matrix on that space
    vector = start
    for _ in range(products):
        length = float(vector.norm())
        for _ in range(2):  # the second time takes away what rounding left
            for other in basis:
                vector = vector - torch.dot(vector, other) * other
        left = float(vector.norm())
        if not left > 1e-5 * length:
            break  # the space is closed
        vector = vector / left
        basis.append(vector)
        vector = product(vector)
        last = len(basis) - 1
        small[last, : last + 1] = [float(torch.dot(other, vector)) for other in basis]
    if not basis or not np.isfinite(small).all():
        return math.nan, start
    values, vectors = np.linalg.eigh(small[: len(basis), : len(basis)])  # of which it reads the lower triangle
    found = sum(float(part) * direction for part, direction in zip(vectors[:, -1], basis, strict=True))
    return float(values[-1]), found / found.norm()


class Sharpness:
    """Measures the sharpness every ``--sharpness-interval`` iterations. Nothing of the run changes by it.

    ``chunks``: Megatron's model, a single chunk. ``run``: of virtual workers with one optimizer.
    """

    def __init__(
        self, config: TrainConfig, chunks: Sequence[Any], optimizer: MegatronOptimizer, run: Run, dataset: GPTDataset
    ) -> None:
        self._config, self._chunks, self._optimizer, self._run, self._dataset = config, chunks, optimizer, run, dataset
        self._model = innermost(chunks[0])
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._vector: torch.Tensor | None = None
        self._found: list[dict[str, float]] = []

    def due(self, iteration: int) -> bool:
        """Return whether to measure after ``iteration`` iterations."""
        interval = self._config.sharpness_interval
        return bool(interval) and iteration % interval == 0

    def measure(self, consumed: int) -> None:
        """Measure at the weights of the last update. ``consumed``: samples until now; its own batch is the last of them."""
        if (scale := self._preconditioner()) is None:
            return  # no update yet
        size = self._config.global_batch_size
        with self._run.owner_weights(self._chunks), evaluating(self._chunks):
            # A worker that has all samples takes them a micro-batch at a time.
            own = RankBatches(self._dataset, self._config, consumed - size, rank=0, size=1)
            batches = list(itertools.islice(own, size // self._config.micro_batch_size))
            kept = [parameter.detach().clone() for parameter in self._parameters]

            def product(vector: torch.Tensor) -> torch.Tensor:
                return scale * self._curvature(batches, kept, scale * vector)

            if (start := self._vector) is None:
                start = torch.randn(scale.numel(), generator=torch.Generator().manual_seed(_SEED)).to(scale.device)
            value, self._vector = largest_eigenvalue(product, start, FIRST if self._vector is None else LATER)
        self._found.append({"sharpness": value, **self._stability(value)})

    def metrics(self) -> dict[str, float]:
        """Return means over the measurements since the last call; nothing without any."""
        found, self._found = self._found, []
        return {name: float(np.mean([record[name] for record in found])) for name in (found[0] if found else ())}

    def _preconditioner(self) -> torch.Tensor | None:
        """Return P^1/2 of all parameters in a row, float32[n]; ``None`` before the first update."""
        parts = []
        inner = {weights: own for own in optimizers(self._optimizer) for weights in own.model_param_group_index_map}
        for parameter in self._parameters:
            adam = inner[parameter].optimizer
            group, place = inner[parameter].model_param_group_index_map[parameter]
            settings = adam.param_groups[group]
            if not (state := adam.state.get(settings["params"][place])):
                return None
            steps = float(state.get("step", settings.get("step", 0)))
            second = state["exp_avg_sq"].flatten() / (1 - settings["betas"][1] ** steps)
            parts.append(lr_scale(self._config) / (second.sqrt() + settings["eps"]))
        return torch.cat(parts).sqrt()

    def _curvature(self, batches: Sequence[Any], kept: Tensors, direction: torch.Tensor) -> torch.Tensor:
        """Return H times ``direction``, by the difference of gradients on both sides of the weights ``kept``.

        Backward passes of Megatron's own functions cannot be differentiated once more.
        """
        norm = math.sqrt(sum(float(weights.square().sum()) for weights in kept))
        step = STEP * norm / max(float(direction.norm()), torch.finfo(torch.float32).tiny)
        pieces = direction.split([weights.numel() for weights in kept])
        sides = []
        for sign in (1.0, -1.0):
            for parameter, weights, piece in zip(self._parameters, kept, pieces, strict=True):
                torch.add(weights, piece.view_as(weights), alpha=sign * step, out=parameter.data)
            sides.append(self._gradient(batches))
        for parameter, weights in zip(self._parameters, kept, strict=True):
            parameter.data.copy_(weights)
        return (sides[0] - sides[1]) / (2 * step)

    def _gradient(self, batches: Sequence[Any]) -> torch.Tensor:
        """Return the gradient of the loss per token of ``batches``, float32[n]. No buffer of Megatron's is touched."""
        total, tokens = None, 0
        for batch in batches:
            with torch.enable_grad():
                output, _ = forward_step(iter([batch]), self._model)
                loss, counted, _ = sum_of_losses(batch["loss_mask"], output)
                gradients = torch.autograd.grad(loss, self._parameters)
            flat = torch.cat([gradient.flatten() for gradient in gradients]).float()
            total = flat if total is None else total + flat
            tokens += int(counted)
        assert total is not None
        return total / max(1, tokens)

    def _stability(self, sharpness: float) -> dict[str, float]:
        """Return the learning rate times the sharpness; with losses known beforehand, also lag and stable limit."""
        step = get_canonical_lr_for_logging(self._optimizer.param_groups) / lr_scale(self._config) * sharpness
        found = {"lr x sharpness": step}
        now = self._run.iteration
        known = [group.wire.lag(Exchange("param", group.wire.stream, now)) for group in self._run.groups]
        if None not in known:  # the flags determine the lag of replicas at the next iteration's loss rate
            share, mean = np.mean(known, axis=0)
            lag = Lag(float(share), float(1 - share / mean)) if share else Lag()
            config, loss = self._config, self._run.config
            sent = Lead()  # with which owners send
            if lag.share and not loss.sends_weights():
                sent = Lead(*loss.lead) if loss.lead is not None else lead(lag.share, lag.mean)
            beta1 = config.sgd_momentum if config.optimizer == "sgd" else config.adam_beta1
            found["lag x lr x sharpness"] = mean_lag(lag, sent) * step
            found["largest lr x sharpness"] = stability_limit(beta1, lag, sent, config.optimizer == "nadam")
        return found
