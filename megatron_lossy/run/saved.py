"""The file of the replicas that a process saves along with a checkpoint, with ``--save-replicas``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..base.errors import refuse
from ..base.files import replace_file
from ..base.flags import as_text, flag_name, identity
from ..config import LossyConfig, PhaseLoss

#: The folder of saved replicas in a checkpoint.
REPLICAS = "lossy_replicas"
#: The format of saved replicas.
FORMAT = 5
# Flags of the use of replicas, not of their values.
_OF_NO_MATTER = ("eval_weights", "save_replicas")


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state``, with its ``identity`` among it, as the file ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda aside: _save({"format": FORMAT, **state}, aside))


def read(path: Path, device: torch.device, here: Mapping[str, Any], folder: str | os.PathLike) -> dict[str, Any]:
    """Return the state in the file ``path`` of the checkpoint ``folder``.

    Raise :class:`UsageError` if its format is another one, or its identity another one than ``here``.
    """
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    if state["format"] != FORMAT:
        what = f"with {folder}"
        raise refuse("--save-replicas", what, f"it has format {state['format']}; this version reads {FORMAT}")
    check_identity(state["identity"], here, "--save-replicas", f"with {folder}", "the flag")
    return state


def check_identity(saved: Mapping[str, Any], here: Mapping[str, Any], flag: str, value: str, it: str) -> None:
    """Raise :class:`UsageError` if the identity ``saved`` is another one than ``here``.

    ``flag``, ``value``: of the error. ``it``: what would not be needed without replicas.
    """
    for name in dict.fromkeys([*here, *saved]):
        there, now = saved.get(name, "not there"), here.get(name, "not there")
        if str(there) != str(now):
            why = f"{name} was {there} there and is {now} here; without {it} all replicas begin equal"
            raise refuse(flag, value, why)


def flags_of(config: LossyConfig) -> dict[str, str]:
    """Return the flags that must be equal for saved replicas to mean the same, as text. Read the files they name."""
    flags = {
        flag_name(LossyConfig, name): as_text(value)
        for name, value in identity(config).items()
        if name not in _OF_NO_MATTER
    }
    if config.loss_unit != "packet":
        del flags["--packet-bytes"]
    losses = [config.phase(phase) for phase in config.exchanges()]
    if any(loss.matrix or loss.trace for loss in losses):
        flags["--trace"], flags["--loss-model"] = "", " ".join(map(_model, losses))
    return flags


def _model(loss: PhaseLoss) -> str:
    """Return the channel of ``loss``, with the content of its file."""
    if loss.trace is not None:
        return f"{loss.model} of {_content('--trace', loss.trace)}"
    return loss.model if loss.matrix is None else f"{loss.model} of {_content('--loss-model', loss.matrix)}"


def _content(flag: str, path: Path) -> str:
    """Return a digest of the file, or of the folder of a delivery log, that does not depend on its place."""
    try:
        if path.is_dir():
            described = repr(sorted((file.name, file.stat().st_size) for file in path.iterdir())).encode()
        else:
            described = path.read_bytes()
    except OSError as error:
        raise refuse(flag, path, f"cannot be read: {error.strerror}") from None
    return f"SHA-256 {hashlib.sha256(described).hexdigest()[:16]}"


def _save(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:  # given a path, torch would write its name into the file
        torch.save(state, file)
