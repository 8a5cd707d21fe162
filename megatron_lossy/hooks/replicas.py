"""Saving and restoring what makes this rank's replica differ from the owners' weights (``--save-replicas``)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import UsageError, refuse
from ..monitor import load_states, states_of
from ..recovery import rows_for
from .seam import slot_of

if TYPE_CHECKING:
    from .runtime import LossyRuntime

FOLDER = "lossy_replicas"


def _identity(runtime: LossyRuntime) -> dict[str, Any]:
    """What must be equal for the saved state to mean the same."""
    config = runtime.config
    return {
        "world size": dist.get_world_size(),
        "--loss-unit": config.loss_unit,
        "--packet-bytes": config.packet_bytes if config.loss_unit == "packet" else None,
        "--grad-recovery": config.grad_recovery,
    }


def _path(folder: str | os.PathLike) -> Path:
    return Path(folder) / FOLDER / f"rank_{dist.get_rank():05d}.pt"


def _buckets(runtime: LossyRuntime) -> list[Any]:
    return [bucket for ddp in runtime.chunks for bucket_group in _groups(ddp) for bucket in bucket_group.buckets]


def _groups(ddp: Any) -> list[Any]:
    return ddp.bucket_groups + ddp.expert_parallel_bucket_groups


def save_replicas(runtime: LossyRuntime, folder: str | os.PathLike) -> None:
    """Write the stale units and the state of the recovery rules of this rank, aside and renamed."""
    stale = []
    for bucket in _buckets(runtime):
        slot = slot_of(bucket.param_data)
        lost = slot.group.stale(slot.bucket, runtime.update) if runtime.update is not None else None
        if lost is None or not lost.any():
            stale.append(None)
            continue
        units = slot.group.units["param"][slot.bucket]
        values = rows_for(bucket.param_data.device).take(bucket.param_data, units, lost)
        stale.append((torch.from_numpy(lost), values))
    state = {
        "identity": _identity(runtime),
        "iteration": runtime.iteration,
        "update": runtime.update,
        "stale": stale,
        "recovery": [[rule.state_dict() for rule in group.recoveries] for group in runtime.groups],
        "observers": states_of(runtime.observers),
    }
    write_state(state, _path(folder))


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write what ``torch.load`` reads, aside and renamed once it is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    with open(aside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def load_replicas(runtime: LossyRuntime, folder: str | os.PathLike) -> None:
    """Put the saved stale units and recovery state back. Raises :class:`UsageError` if they do not fit this run."""
    path = _path(folder)
    if not (Path(folder) / FOLDER).is_dir():
        raise refuse("--save-replicas", f"with {folder}", "that checkpoint was saved without replicas; omit the flag")
    if not path.is_file():
        raise refuse("--save-replicas", path, f"is missing; the run must have the world size of {folder}")
    device = next((bucket.param_data.device for bucket in _buckets(runtime)), torch.device("cpu"))
    state = torch.load(path, map_location=device, weights_only=True)
    for name, value in _identity(runtime).items():
        if state["identity"][name] != value:
            raise refuse(
                "--save-replicas", f"with {folder}", f"{name} was {state['identity'][name]} there and is {value} here"
            )
    buckets = _buckets(runtime)
    if len(state["stale"]) != len(buckets):
        raise UsageError(f"--save-replicas with {folder}: it has {len(state['stale'])} buckets, the run {len(buckets)}")
    runtime.iteration, runtime.update = state["iteration"], state["update"]
    for bucket, saved in zip(buckets, state["stale"]):
        if saved is not None:
            slot = slot_of(bucket.param_data)
            lost, values = saved
            units = slot.group.units["param"][slot.bucket]
            with torch.no_grad():
                rows_for(device).put_(bucket.param_data, units, lost.cpu().numpy(), values)
    for group, rules in zip(runtime.groups, state["recovery"], strict=True):
        for rule, saved in zip(group.recoveries, rules, strict=True):
            rule.load_state_dict(saved, device)
    load_states(runtime.observers, state["observers"])
