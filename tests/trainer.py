"""The training program for tests: tiny runs on gloo ranks or from its command line, and what they leave behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
import warnings
from pathlib import Path

from megatron_lossy.base.checkpoints import latest_iteration
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.train.config import TrainConfig

ROOT = Path(__file__).parents[1]

#: Settings of :class:`TrainConfig` but the data. With this hidden size no parameter needs padding, which is saved
#: uninitialised and could not be compared.
TINY = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
TINY |= {"seq_length": 32, "micro_batch_size": 2, "global_batch_size": 8, "train_iters": 8}
TINY |= {"lr": 1e-2, "lr_warmup_iters": 2, "hidden_dropout": 0.1}
TINY |= {"eval_interval": 4, "eval_iters": 2, "log_interval": 2}


def write_data(rank: int, folder: str) -> None:
    """The license, a text that never changes, indexed as ``train`` and ``valid`` in ``folder``.

    Of another text a gradient may be rounding alone, of which Adam makes a whole step.
    """
    from megatron_lossy.lab.data import build_tokenizer, write_indexed

    text = (ROOT / "LICENSE").read_bytes()
    for split, part in (("train", text[:8000]), ("valid", text[8000:12000])):
        write_indexed([("text", part)], os.path.join(folder, split), build_tokenizer("byte"))


def train_runs(rank: int, *runs: tuple[dict, dict]):
    """Train one run after the other in the same processes; returns their summaries and rank 0's output.

    The ranks are daemons, which may not have children: to save, too, they must do without.
    """
    warnings.simplefilter("ignore")
    from megatron_lossy.lab.train.loop import train

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        summaries = [train(TrainConfig(**config), LossyConfig(**loss)) for config, loss in runs]
    return summaries, output.getvalue()


def in_iteration(number: int, act) -> None:
    """Call ``act(made)`` before each iteration from ``number`` on, counted from 1, in this process."""
    from megatron_lossy.lab.train.loop import _Run

    step, made = _Run._step, []

    def watched(self, batches):
        made.append(1)
        if len(made) >= number:
            act(len(made))
        return step(self, batches)

    _Run._step = watched


def read_records(folder: Path, kind: str) -> list[dict]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def recorded_losses(folder: Path) -> list[tuple]:
    """Return everything that is recorded of a run but its times and datagrams, to the last bit."""
    kept = [r for kind in ("train", "valid") for r in read_records(folder, kind)]
    return [tuple((k, v) for k, v in record.items() if k != "seconds" and k[:4] != "udp ") for record in kept]


def checkpoint_bytes(folder: Path, iteration: int) -> dict:
    """Return all tensors of a checkpoint, by name, as bytes."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    path = folder / f"iter_{iteration:07d}"
    metadata = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=str(path))
    return {key: value.reshape(-1).view(torch.uint8).numpy().tobytes() for key, value in state.items()}


def saved_replicas(folder: Path, iteration: int) -> list[bytes]:
    """Return the files of replicas of a checkpoint."""
    files = sorted((folder / f"iter_{iteration:07d}" / "lossy_replicas").iterdir())
    return [file.read_bytes() for file in files]


def tensorboard(folder: Path):
    """Return the events for TensorBoard in ``folder``."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def weights_of(folder: Path) -> dict[str, bytes]:
    """Return the owners' weights and the optimizer's moments in the last checkpoint."""
    found = checkpoint_bytes(folder, latest_iteration(folder))
    return {name: value for name, value in found.items() if "rng" not in name}


def as_flags(config: dict) -> list[str]:
    """Return the command line that says ``config``."""
    flags = []
    for name, value in config.items():
        values = value if isinstance(value, tuple) else () if value is True else (value,)
        flags += ["--" + name.replace("_", "-"), *map(str, values)]
    return flags
