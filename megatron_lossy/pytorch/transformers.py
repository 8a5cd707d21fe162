"""Loss in a ``Trainer`` of Hugging Face transformers (docs/pytorch.md).

trainer.add_callback(LossyCallback(trainer, {"p_grad": 0.1, "param_sync_interval": 10})) trainer.train()
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from transformers import Trainer, TrainerCallback

from ..config import LossyConfig
from .base import LossyRun
from .make import make_lossy


class LossyCallback(TrainerCallback):
    """Makes the exchanges of ``trainer`` lossy while it trains, and logs, saves and resumes with it.

    ``config``: as for :func:`.make_lossy`. ``resume``: the checkpoint that the trainer resumes from, if it is none of its
    own output folder; ``False`` if it was saved without losses. Each rank saves a file of its own in each checkpoint; with
    it a run continues bit for bit. ``how``: further arguments of :func:`.make_lossy`.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: LossyConfig | Mapping[str, Any] | str | os.PathLike[str],
        *,
        resume: str | os.PathLike[str] | Literal[False] | None = None,
        **how: Any,
    ) -> None:
        self.trainer = trainer
        self.config = config
        self.resume = resume
        self.how = how
        #: Result of :func:`.make_lossy`, while the trainer trains.
        self.lossy: LossyRun | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the model lossy, which is wrapped and loaded by now."""
        trainer = self.trainer
        how = {"scaler": trainer.accelerator.scaler, **self.how}
        self.lossy = make_lossy(trainer.model_wrapped, trainer.optimizer, self.config, **how)
        if state.global_step and self.resume is False:
            self.lossy.restart(state.global_step)
        elif state.global_step:
            self.lossy.load(self.resume or self._folder(state))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Log what was measured, where the loss of training is logged."""
        if self.lossy is not None and "loss" in (logs or {}) and (measured := self.lossy.metrics()):
            self.trainer.log(measured)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the state of this rank in the checkpoint."""
        if self.lossy is not None and not (args.save_only_model or state.is_hyper_param_search):
            self.lossy.save(self._folder(state))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End the losses."""
        if self.lossy is not None:
            self.lossy.close()
            self.lossy = None

    def _folder(self, state: Any) -> str:
        return os.path.join(self.trainer.args.output_dir, f"checkpoint-{state.global_step}")
