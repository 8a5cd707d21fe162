"""An FSDP2 model on islands: ``python -m tests.elastic_fsdp FOLDER STEPS PAUSE FLAGS``, of one launch, or each a launch of its own."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron_lossy.base.errors import usage_errors
from megatron_lossy.base.files import replace_file
from megatron_lossy.config import LossyConfig
from megatron_lossy.pytorch import make_lossy
from tests import fsdp
from tests.quick_islands import hurry


class Island(fsdp.Training):
    """One of the islands of ``config``."""

    def __init__(self, config: LossyConfig, steps: int) -> None:
        self.tiny, ranks = fsdp.Tiny(), dist.get_world_size()
        self.apart, mesh = config.rendezvous is not None, None
        if not self.apart:
            shape = config.islands, ranks // config.islands
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("island", "shard"))["shard"]
        self.model = fsdp.build(self.tiny, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.lossy = make_lossy(self.model, self.optimizer, config, steps=steps)
        self.island = config.island if self.apart else dist.get_rank() // shape[1]
        self.place = dist.get_rank() + (self.island * ranks if self.apart else 0)

    def loss(self, number: int) -> torch.Tensor:
        """Return the loss of batch ``number`` of this rank, among those of all islands."""
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1000 * number + self.place))
        return (self.model(x) - x[:, :3].sin()).square().mean()

    def save(self, path: Path, step: int) -> None:
        """Save this rank's part of the run after ``step`` updates."""
        kept = {"model": self.model, "optimizer": self.optimizer, "lossy": self.lossy}
        replace_file(
            path,
            lambda aside: torch.save({name: one.state_dict() for name, one in kept.items()} | {"step": step}, aside),
        )

    def loaded(self, path: Path) -> int:
        """Load what :meth:`save` wrote. Return the updates."""
        state = torch.load(path, weights_only=False)
        for name in ("model", "optimizer", "lossy"):
            getattr(self, name).load_state_dict(state[name])
        return state["step"]


def main(folder: str, steps: str, pause: str, flags: str) -> None:
    """Train, and save the weights of each island."""
    hurry()
    dist.init_process_group("gloo")
    with usage_errors("elastic_fsdp"):
        run = Island(LossyConfig(**json.loads(flags)), int(steps))
        path = Path(folder, f"saved_{run.place}.pt")
        step = run.loaded(path) if path.exists() else 0
        while (step := run.lossy.catch_up(step)) < int(steps):
            print(f"step {step}: {run.step(step):.6f}", flush=True)
            step += 1
            if step % 20 == 0:
                run.save(path, step)
            time.sleep(float(pause))
    run.lossy.settle()
    weights = run.weights()
    with run.lossy.consensus_weights() as meet:
        run.lossy.settle()
        print(f"consensus {meet}", flush=True)
    np.savez(f"{folder}/island_{run.island}_{dist.get_rank()}.npz", **weights)
    run.lossy.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
