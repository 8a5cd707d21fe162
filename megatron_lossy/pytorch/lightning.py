"""Loss in a ``Trainer`` of Lightning, with DDP or FSDP2 (``ModelParallelStrategy``) (docs/pytorch.md).

Trainer(strategy="ddp", callbacks=[LossyCallback({"p_grad": 0.1, "param_sync_interval": 10})])
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the package of the same classes by its older name
    from pytorch_lightning import Callback, LightningModule, Trainer

from ..config import LossyConfig
from .base import LossyRun
from .make import make_lossy


class LossyCallback(Callback):
    """Makes the exchanges of a model lossy while it trains, and logs, saves and resumes with the trainer.

    ``config``: as for :func:`.make_lossy`. Each rank saves a file of its own in a folder next to the checkpoints, which
    has the number of the step, and whose name is in the checkpoint; with it a run continues bit for bit. ``resume``:
    that folder, if it has been moved. ``how``: further arguments of :func:`.make_lossy`.
    """

    def __init__(
        self,
        config: LossyConfig | Mapping[str, Any] | str | os.PathLike[str],
        *,
        resume: str | os.PathLike[str] | None = None,
        **how: Any,
    ) -> None:
        self.config = config
        self.resume = resume
        self.how = how
        #: Result of :func:`.make_lossy`, while the trainer trains.
        self.lossy: LossyRun | None = None
        self._trainer: Trainer | None = None
        self._logged = 0  # the step of the last record

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the model lossy, which is wrapped and loaded by now."""
        how = {"scaler": getattr(trainer.precision_plugin, "scaler", None), **self.how}
        self.lossy = make_lossy(trainer.strategy.model, trainer.optimizers, self.config, **how)
        self._trainer, self._logged = trainer, trainer.global_step
        if trainer.global_step and self.resume is not None:
            self.lossy.load(self.resume)
        elif trainer.global_step:  # the checkpoint was saved without this callback
            self.lossy.restart(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log what was measured, as often as the trainer logs."""
        step = trainer.global_step
        if self.lossy is None or step == self._logged or step % trainer.log_every_n_steps:
            return
        self._logged, measured = step, self.lossy.metrics()
        for logger in trainer.loggers:
            logger.log_metrics(measured, step)

    def state_dict(self) -> dict[str, Any]:
        """Return the folder of the states of all ranks, which are written there. A collective call."""
        if self.lossy is None or self._trainer is None:
            return {}
        place = getattr(self._trainer.checkpoint_callback, "dirpath", None) or self._trainer.default_root_dir
        folder = os.path.join(place, f"lossy-step={self._trainer.global_step}")
        self.lossy.save(folder)
        return {"folder": folder}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Note the folder that training resumes from."""
        self.resume = self.resume or state_dict.get("folder")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the losses."""
        if self.lossy is not None:
            self.lossy.close()
            self.lossy = None
