"""Loss in torchtitan's own trainer (docs/pytorch.md). In a module that torchtitan runs with ``--module``:

def my_config():
    return with_loss(llama3_debugmodel(), "wan")
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.trainer import Trainer

from ..base.errors import refuse
from ..config import LossyConfig
from .base import LossyRun
from .make import make_lossy


class LossyTrainer(Trainer):
    """torchtitan's trainer with lossy exchanges, which logs, saves and resumes as torchtitan does.

    A checkpoint of it has the state of each rank, with which a run continues bit for bit.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration, and the loss flags."""

        lossy: str | None = None
        """Loss flags: the name of a preset, or a YAML file. Without them nothing is lost."""

    def __init__(self, config: Config) -> None:
        #: Result of :func:`.make_lossy`, if anything is lost.
        self.lossy: LossyRun | None = None
        self._loaded: bytes | None = None
        spec = config.model_spec
        built = partial(self._make_lossy, spec.post_optimizer_build_fn)
        config.model_spec = dataclasses.replace(spec, post_optimizer_build_fn=built)
        super().__init__(config)

    def _make_lossy(
        self, before: Callable[..., Any] | None, optimizers: Any, model_parts: list[torch.nn.Module], dims: Any
    ) -> None:
        """Make the model lossy, which is sharded and not yet loaded."""
        if before is not None:
            before(optimizers, model_parts, dims)
        if self.config.lossy is None:
            return
        if len(model_parts) > 1:
            degree = self.config.parallelism.pipeline_parallel_degree
            raise refuse("pipeline_parallel_degree", degree, "has several parts of a model on a rank; choose one part")
        self.lossy = make_lossy(model_parts[0], list(optimizers), self.config.lossy)

    def train_step(self, data_iterator: Any) -> None:
        """Make a step, and log what was measured as often as torchtitan logs."""
        if self.lossy is not None and self._loaded is not None:  # torchtitan has loaded model and optimizers by now
            self.lossy.load_state_dict(torch.load(io.BytesIO(self._loaded), weights_only=True))
            self._loaded = None
        super().train_step(data_iterator)
        if self.lossy is not None and self.metrics_processor.should_log(self.step):
            self.metrics_processor.logger.log(self.lossy.metrics(), self.step)

    def state_dict(self) -> dict[str, Any]:
        """Return the trainer's state, and that of this rank's replica. A collective call."""
        state = super().state_dict()
        if self.lossy is not None:
            written = io.BytesIO()
            torch.save(self.lossy.state_dict(), written)
            state[self._name] = written.getvalue()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; the replica is restored before the next step."""
        super().load_state_dict(state_dict)
        self._loaded = state_dict.get(self._name)

    @property
    def _name(self) -> str:
        return f"lossy_rank_{dist.get_rank()}"

    def close(self) -> None:
        """End the losses, and close what torchtitan closes."""
        if self.lossy is not None:
            self.lossy.close()
            self.lossy = None
        super().close()


def with_loss(config: Trainer.Config, lossy: LossyConfig | Mapping[str, Any] | str) -> LossyTrainer.Config:
    """Return ``config`` for :class:`LossyTrainer`. ``lossy``: as for :func:`.make_lossy`."""
    known = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    return LossyTrainer.Config(**known, lossy=lossy)  # type: ignore[arg-type]
