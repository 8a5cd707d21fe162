"""What a run left behind, as plain values that can be compared and kept: the half of scripts/same_results.py that reads.

It reads formats, not code: metrics.jsonl, checkpoints of megatron.core.dist_checkpointing, saved replicas, the
delivery log, and what was printed. Times and versions are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any

#: Of a "run" record: says when and with what it was made.
_INCIDENTAL = {"versions", "hardware", "date", "seconds"}
_TIMES = [
    (re.compile(r"\[\d{4}-\d\d-\d\d [\d:.]+\] ?"), ""),
    (re.compile(r"elapsed time per iteration \(ms\): [\d.]+ \| ?"), ""),
]
#: What of Megatron-LM's output does not depend on time.
_MEGATRON = re.compile(
    r"iteration +\d+/.*?number of nan iterations: +\d+ \||validation loss at iteration [^|\n]*(?:\| [^|\n:]+: "
    r"[\d.E+-]+ )+\|| exchanges up to iteration [^\n]*"
)
_LONG = 64


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _tensor(value: Any) -> str:
    """A tensor in a line: type, shape, hash of its bytes, and a norm for the reader of a difference."""
    import torch

    # Copied, because a tensor of one element may have any stride.
    flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    kind = str(value.dtype).removeprefix("torch.")
    norm = f" norm {flat.double().norm().item()!r}" if value.dtype.is_floating_point else ""
    return f"{kind}{list(value.shape)} {_sha(data)}{norm}"


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested containers by their paths, each as JSON's number, text, truth or nothing."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return {path: _tensor(value)}
    if isinstance(value, np.ndarray):
        return {path: f"{value.dtype}{list(value.shape)} {_sha(np.ascontiguousarray(value).tobytes())}"}
    if isinstance(value, io.BytesIO):
        return {path: _sha(value.getvalue())}
    if isinstance(value, bytes):
        return {path: _sha(value) if len(value) > 16 else value.hex()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        if len(value) > _LONG and all(isinstance(item, int | float) for item in value):
            return {path: f"{len(value)} numbers {_sha(repr(list(value)).encode())}"}
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        plain = value is None or isinstance(value, str | int | float | bool)
        return {path: repr(value) if isinstance(value, float) else value if plain else str(value)}
    leaves = {path + "/": len(items)} if not items else {}
    for key, item in items:
        leaves.update(flatten(item, f"{path}/{key}" if path else key))
    return leaves


def _checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(weights and optimizer state, settings) of a checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    state: dict[str, Any] = {}
    leaves: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for file in sorted(folder.rglob("*.pt")):
        if "lossy_replicas" not in file.parts:
            content = torch.load(file, weights_only=False, map_location="cpu")
            name = file.relative_to(folder).with_suffix("").as_posix()
            if "args" in content:
                settings.update(flatten(content.pop("args"), f"{name} args"))
            leaves.update(flatten(content, name))
    if (folder / ".metadata").exists():
        for key, value in dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata.items():
            is_tensor = isinstance(value, TensorStorageMetadata)
            state[key] = torch.empty(value.size, dtype=value.properties.dtype) if is_tensor else io.BytesIO()
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    for key, value in sorted(state.items()):
        if isinstance(value, io.BytesIO):
            value.seek(0)
            value = torch.load(value, weights_only=False)
        leaves.update(flatten(value, key))
    return {path: value for path, value in leaves.items() if "seconds" not in path}, settings


def _log(path: Path) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """(rows, metadata, settings) of a file of the delivery log."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    table = file.read()
    rows = [" ".join(table.column_names)]
    for row in zip(*(column.to_pylist() for column in table.columns)):
        words = (("-" if v is None else v.hex() if len(v) <= 8 else _sha(v)) if not isinstance(v, int | str) else v for v in row)
        rows.append(" ".join(map(str, words)))
    meta = json.loads((file.metadata.metadata or {}).get(b"megatron_lossy", b"{}"))
    meta.pop("version", None)
    settings = flatten(meta.pop("loss", {}), "loss")
    return rows, flatten(meta), settings


def _events(path: Path) -> dict[str, Any]:
    """The scalars in a file of TensorBoard, if it is installed."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return {}
    events = EventAccumulator(str(path))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag not in _INCIDENTAL]
    return {f"train {event.step} {tag}": repr(event.value) for tag in tags for event in events.Scalars(tag)}


def _console(texts: list[str], program: str) -> list[str]:
    if program == "launcher":
        lines = [line for text in texts for line in _MEGATRON.findall(text)]
    else:
        lines = [line for text in texts for line in text.splitlines()]
    for pattern, instead in _TIMES:
        lines = [pattern.sub(instead, line) for line in lines]
    return lines


def digest(folder: Path, outcome: dict[str, Any], program: str) -> dict[str, Any]:
    """Everything that is compared of a case.

    ``settings`` are flags on record, of which a later version may have more; all else must be equal.
    """
    result: dict[str, Any] = {"statuses": [], "errors": "", "console": []}
    parts: dict[str, dict[str, Any]] = {
        name: {} for name in ("records", "weights", "replicas", "log", "log metadata", "settings")
    }
    for run in outcome["runs"]:
        result["statuses"].append(run["statuses"])
        result["console"] += _console(run["output"], program)
        if any(run["statuses"]):
            result["errors"] = run["errors"]
    files = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            if re.fullmatch(r"iter_\d{7}", path.name):
                weights, settings = _checkpoint(path)
                parts["weights"].update((f"{name}: {key}", value) for key, value in weights.items())
                parts["settings"].update((f"{name}: {key}", value) for key, value in settings.items())
            continue
        if "lossy_replicas" in path.parts:
            import torch

            replicas = flatten(torch.load(path, weights_only=True, map_location="cpu"))
            parts["replicas"].update((f"{name}: {key}", value) for key, value in replicas.items())
            continue
        if "tfevents" in path.name:
            folder_name = path.parent.relative_to(folder).as_posix()
            parts["records"].update((f"{folder_name}: {key}", value) for key, value in _events(path).items())
            continue
        if path.suffix != ".distcp":
            files.append(name)
        if path.name == "metrics.jsonl":
            for number, line in enumerate(path.read_text().splitlines()):
                record = json.loads(line)
                place = f"{name}: {record.get('kind')} {record.get('iteration', '')} {record.get('weights', '')}".strip()
                place += f" (line {number + 1})"
                parts["settings"].update(flatten(record.pop("config", {}), f"{place} config"))
                kept = {key: value for key, value in record.items() if key not in _INCIDENTAL}
                parts["records"].update(flatten(kept, place))
        elif path.name in ("settings.json", "_run.json"):
            values = json.loads(path.read_text())
            values.pop("version", None)
            parts["settings"].update(flatten(values, name))
        elif path.suffix == ".parquet":
            rows, meta, settings = _log(path)
            parts["log"].update((f"{name}: row {number}", row) for number, row in enumerate(rows))
            parts["log metadata"].update((f"{name}: {key}", value) for key, value in meta.items())
            parts["settings"].update((f"{name}: {key}", value) for key, value in settings.items())
    return {**result, **parts, "files": files}
