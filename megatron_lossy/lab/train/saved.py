"""The description of a run in its folder: its settings and its latest checkpoint.

It is read before any process group exists, so that a wrong folder costs one line and no launch.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ...base.checkpoints import TRACKER, latest_iteration
from ...base.errors import cannot, refuse
from ...base.files import check_folder, write_text, writing
from ...base.flags import difference, differences, flag_name, identity, of_flags, texts_by_flag
from ...base.jobs import Jobs
from ...config import LossyConfig
from ..data import epochs
from .config import SHAPE, TrainConfig
from .metrics import METRICS_FILE

SETTINGS = "settings.json"
# The flags that fix the order of the samples.
_SAMPLES = ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "seed")
# The flags that name data, whose contents count.
_PATHS = ("data_path", "valid_data_path")
# Besides paths and incidental flags, those that each of several jobs may have as it likes.
_OWN = (
    "data",
    "data_path",
    "valid_data_path",
    "eval_interval",
    "eval_iters",
    "overlap_grad_reduce",
    "overlap_param_gather",
)


def settings_of(config: TrainConfig, lossy: LossyConfig, data: list[Any] | None) -> dict[str, Any]:
    """Return the settings that identify a run, as in JSON. ``data``: the fingerprint of its data, if known."""
    return json.loads(json.dumps({"train": identity(config), "loss": identity(lossy), "data": data}))


def shared_settings(config: TrainConfig, data: list[Any]) -> dict[str, str]:
    """Return the settings that must be alike in jobs that average weights, by flag. ``data``: their fingerprint."""
    own = {name: value for name, value in identity(config).items() if name not in _OWN}
    text = blake2b(json.dumps(data).encode(), digest_size=8).hexdigest()
    return texts_by_flag(config, own) | {"--data-path": f"(digest of its text {text})"}


def in_folders_of_job(config: TrainConfig, jobs: Jobs, job: int) -> TrainConfig:
    """Return ``config`` with the folders of ``job``, of real ranks, within those that it names."""
    named = {name: getattr(config, name) for name in ("save", "metrics_dir", "tensorboard_dir")}
    folders = {name: jobs.folder(path, job) for name, path in named.items() if path}
    if config.load:
        folders["load"] = jobs.folder_to_load(config.load, job)
    return dataclasses.replace(config, **folders)


def same_folder(a: str | None, b: str | None) -> bool:
    """Return whether both name one folder."""
    return a is not None and b is not None and os.path.realpath(a) == os.path.realpath(b)


def check_folders(
    config: TrainConfig, lossy: LossyConfig, data: list[Any] | None = None, data_path: Sequence[str] | None = None
) -> None:
    """Raise :class:`UsageError` if a folder cannot be used, or holds another run, or a checkpoint that does not fit.

    ``data``: the fingerprint of the data; ``data_path``: its prefixes, which ``--data`` may stand for; if they are known.
    """
    resuming = same_folder(config.save, config.load)
    for flag in ("save", "metrics_dir", "tensorboard_dir", "data_cache_path"):
        check_folder(flag_name(TrainConfig, flag), getattr(config, flag))
    for flag, folder in (("--save", config.save), ("--metrics-dir", config.metrics_dir)):
        if (settings := read_settings(flag, folder)) is None:
            if folder and (Path(folder) / METRICS_FILE).exists():
                raise refuse(flag, folder, "holds another run")
            continue
        here = settings_of(config, lossy, data)
        other = _other_run(settings, here)
        if other and not (resuming and _extends(settings, here, config, lossy, data_path or config.data_path)):
            go_on = f"; to go on from it with other settings, --load it and {flag} elsewhere" if resuming else ""
            if go_on and other.startswith("--train-iters"):
                go_on += "; a finished run takes more --train-iters if it has --lr-decay-iters, and data for them"
            raise refuse(flag, folder, f"holds another run ({other}); choose another folder{go_on}")
        if not resuming:
            raise refuse(flag, folder, "holds a run with these settings; --load it as well to continue")
    if config.load and latest_iteration(config.load) is not None:
        _check_loaded(config, lossy, data)
    elif config.load and not resuming:
        what = f"has no {TRACKER}, which names a checkpoint" if os.path.isdir(config.load) else "is no folder"
        raise refuse("--load", config.load, f"{what}; to start a run, leave it out or give the folder of --save")


def _extends(
    there: dict[str, Any], here: dict[str, Any], config: TrainConfig, lossy: LossyConfig, data: Sequence[str] | None
) -> bool:
    """Return whether the finished run ``there`` can continue with the larger ``--train-iters`` of ``config``."""
    before = there["train"]["train_iters"]
    scheduled = config.lr_decay_style == "constant" or config.lr_decay_iters is not None
    if config.optimizer == "nadam":
        scheduled = scheduled and config.nadam_momentum_decay is not None
    return (
        latest_iteration(config.load) == before < config.train_iters
        and scheduled
        and not (lossy.averages or lossy.async_pipeline)  # which end in their own way
        # If data is read again, the samples have another order. Of a blend half a percent more is asked for.
        and (data is None or epochs(data, config.tokens) < 0.99)
        and _other_run(there, here | {"train": here["train"] | {"train_iters": before}}) is None
    )


def changed_settings(config: TrainConfig, lossy: LossyConfig, data: list[Any]) -> str | None:
    """Return the settings that differ from those of the run that ``--load`` names, in words; ``None`` if none does."""
    if (settings := read_settings("--load", config.load)) is None:
        return None
    here = settings_of(config, lossy, data)
    of_train = {name: value for name, value in here["train"].items() if name not in ("data", *_PATHS)}
    changed = [*differences(TrainConfig, settings["train"], of_train)]
    changed += differences(LossyConfig, settings["loss"], here["loss"])
    if settings["data"] is not None and settings["data"] != here["data"]:
        changed.append("the data had other contents")
    return "; ".join(changed) or None


def write_settings(config: TrainConfig, lossy: LossyConfig, data: list[Any]) -> None:
    """Claim the folders that this run writes to."""
    for flag, folder in (("--save", config.save), ("--metrics-dir", config.metrics_dir)):
        settings = settings_of(config, lossy, data)
        if folder is not None and read_settings(flag, folder) != settings:  # a new run, or one that goes on for longer
            with writing(flag, folder):
                Path(folder).mkdir(parents=True, exist_ok=True)
                write_text(Path(folder) / SETTINGS, json.dumps(settings, indent=1))


def read_settings(flag: str, folder: str | os.PathLike[str] | None) -> dict[str, Any] | None:
    """Return the settings of the run in ``folder``; ``None`` if there is none. Raise :class:`UsageError`."""
    if folder is None or not (path := Path(folder) / SETTINGS).is_file():
        return None
    try:
        settings = json.loads(path.read_text())
        if not all(isinstance(settings[part], dict) for part in ("train", "loss")) or "data" not in settings:
            raise ValueError
    except OSError as error:
        raise cannot(flag, path, "read", error) from None
    except (ValueError, KeyError, TypeError):
        raise refuse(flag, folder, f"{SETTINGS} there is not of this program, or damaged") from None
    return settings


def _other_run(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    for part, cls in (("train", TrainConfig), ("loss", LossyConfig)):
        if found := difference(cls, there[part], here[part]):
            return found
    return "its data sets had other contents" if here["data"] not in (None, there["data"]) else None


def _check_loaded(config: TrainConfig, lossy: LossyConfig, data: list[Any] | None) -> None:
    settings = read_settings("--load", config.load)
    if settings is None and (flag := LossyConfig.folders_of_weights.get(Path(config.load).name)):
        why = f"has mean weights alone ({flag}), for --finetune of Megatron-LM; load the run's own checkpoint"
        raise refuse("--load", config.load, why)
    if settings is None:
        raise refuse("--load", config.load, f"holds no checkpoint of this program: no {SETTINGS}")
    saved = of_flags(TrainConfig, settings["train"])
    for name in SHAPE:
        there, here = saved.shape()[name], config.shape()[name]
        if there != here:
            raise refuse("--load", config.load, f"{flag_name(TrainConfig, name)} was {there} there and is {here} here")
    # For samples under way between stages, one stage has the activations and another the labels.
    under_way = config.pipeline_model_parallel_size > 1 and latest_iteration(config.load) != saved.train_iters
    if not (lossy.holds_samples() and lossy.save_replicas and under_way):
        return
    here = settings_of(config, lossy, data)
    changed = difference(TrainConfig, settings["train"], {name: here["train"][name] for name in _SAMPLES})
    if changed is None and data is not None and settings["data"] != here["data"]:
        changed = "the data had other contents"
    if changed:
        why = f"{changed}: other samples were under way between stages; without the flag the pipe fills again"
        raise refuse("--save-replicas", f"with --load {config.load}", why)
