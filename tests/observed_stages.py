"""Weights, norms and losses of real ranks of an asynchronous pipeline, or of virtual stages."""

from __future__ import annotations

import re
import warnings

import numpy as np
import torch


def observed_run(rank: int, config: dict, loss: dict, first: dict | None = None) -> dict:
    """Train; the weights of this rank's stage before the first iteration and after each, by name, and the norms.

    ``logged``: on rank 0, (loss, norm of the gradient) of each log line. ``first``: the weights of the whole model to start
    from; default random ones. With virtual stages the stage is the whole model.
    """
    warnings.simplefilter("ignore")
    from megatron_lossy.config import LossyConfig
    from megatron_lossy.lab.async_pipeline.workers import StageWorkers
    from megatron_lossy.lab.train import loop
    from megatron_lossy.lab.train.config import TrainConfig
    from megatron_lossy.lab.train.metrics import Console
    from megatron_lossy.lab.train.workers import Workers

    seen: dict = {"weights": [], "norms": [], "logged": []}

    class Observed(Console):
        def note(self, text):
            pass

        def train(self, record, *_):
            seen["logged"].append((record["lm loss"], record["grad norm"]))

        def valid(self, record):
            pass

    workers = Workers if config.get("virtual_workers") else StageWorkers

    def iterate(self, *arguments, original=workers.iterate):
        [chunk] = self._chunks
        if not seen["weights"]:
            seen["weights"].append(_weights(chunk.module))
        result = original(self, *arguments)
        seen["weights"].append(_weights(chunk.module))
        seen["norms"].append(result[2])
        return result

    def build_model(config, vocab_size, original=loop.build_model):
        [chunk] = original(config, vocab_size)
        for name, parameter in chunk.module.named_parameters() if first else ():
            parameter.data.copy_(torch.from_numpy(first[_in_whole(name.removeprefix("module."), config)]))
        return [chunk]

    workers.iterate, loop.build_model = iterate, build_model
    loop.train(TrainConfig(**config), LossyConfig(**loss), Observed())
    return seen


def _in_whole(name: str, config) -> str:
    """Return the name in the whole model of the parameter ``name`` of this rank's stage."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    return in_whole(name, stage * config.num_layers // config.pipeline_model_parallel_size)


def in_whole(name: str, before: int) -> str:
    """Return the whole model's name of the parameter ``name`` of a stage, with ``before`` layers before the stage."""
    return re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) + before), name)


def _weights(module) -> dict[str, np.ndarray]:
    named = ((name.removeprefix("module."), p) for name, p in module.named_parameters())
    return {name: p.detach().float().numpy().copy() for name, p in named}
