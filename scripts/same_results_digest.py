"""Results of runs as plain values that can be compared and kept: the part of scripts/same_results.py that reads.

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from same_results_compare import PARTS

#: Of records: when and with what they were made, and times.
_INCIDENTAL = {"versions", "hardware", "date", "seconds", "sync wait"}
_TIMES = [
    (re.compile(r"\[\d{4}-\d\d-\d\d [\d:.]+\] ?"), ""),
    (re.compile(r"elapsed time per iteration \(ms\): [\d.]+ \| ?"), ""),
]
#: Lines of Megatron-LM's output that do not depend on time.
_MEGATRON = re.compile(
    r"iteration +\d+/.*?number of nan iterations: +\d+ \||validation loss at iteration [^|\n]*(?:\| [^|\n:]+: "
    r"[\d.E+-]+ )+\|| exchanges up to iteration [^\n]*"
)
_LONG = 64


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _tensor(value: Any) -> str:
    """Return a tensor in a line: type, shape, hash of its bytes, and a norm for the reader of a difference."""
    import torch

    # Copied, because a tensor of one element may have any stride.
    flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    kind = str(value.dtype).removeprefix("torch.")
    norm = f" norm {flat.double().norm().item()!r}" if value.dtype.is_floating_point else ""
    return f"{kind}{list(value.shape)} {_sha(data)}{norm}"


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested containers by their paths, each as JSON's number, text, truth or nothing."""
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
    """Return (weights and optimizer state, settings) of a checkpoint."""
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


def _word(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex() if len(value) <= 8 else _sha(value)
    return "-" if value is None else str(value)


def _log(path: Path) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
    """Return (rows, metadata, settings) of a file of the delivery log."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path)
    table = file.read()
    rows = [" ".join(table.column_names)]
    for row in zip(*(column.to_pylist() for column in table.columns)):
        rows.append(" ".join(map(_word, row)))
    meta = json.loads((file.metadata.metadata or {}).get(b"megatron_lossy", b"{}"))
    meta.pop("version", None)
    settings = flatten(meta.pop("loss", {}), "loss")
    return rows, flatten(meta), settings


def _events(path: Path) -> dict[str, Any]:
    """Return the scalars in a file of TensorBoard, if it is installed."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        return {}
    events = EventAccumulator(str(path))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag not in _INCIDENTAL]
    return {f"train {event.step} {tag}": repr(event.value) for tag in tags for event in events.Scalars(tag)}


# The trainer prints its settings before the first iteration; they are compared as settings.
_HEADER = "loss: "


def _console(texts: list[str], program: str) -> list[str]:
    if program == "launcher":
        lines = [line for text in texts for line in _MEGATRON.findall(text)]
    else:
        lines = [line for text in texts for line in text.splitlines() if not line.startswith(_HEADER)]
    for pattern, instead in _TIMES:
        lines = [pattern.sub(instead, line) for line in lines]
    return lines


def _metrics(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        record = json.loads(line)
        words = filter(None, (record.get("kind"), record.get("iteration"), record.get("weights")))
        place = f"{name}: {' '.join(map(str, words))} (line {number})"
        if "config" in record:
            yield "settings", flatten(record.pop("config")), f"{place} config/"
        yield "records", flatten({key: value for key, value in record.items() if key not in _INCIDENTAL}), f"{place}/"


def _left(path: Path, name: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Return the contents of the file or folder ``path``: part of the outcome, values, and prefix of their names."""
    if path.is_dir():
        if re.fullmatch(r"iter_\d{7}", path.name):
            weights, settings = _checkpoint(path)
            yield "weights", weights, f"{name}: "
            yield "settings", settings, f"{name}: "
    elif _is_replica(path):
        import torch

        state = torch.load(path, weights_only=False, map_location="cpu")
        state.pop("format")  # another one lays the same state out otherwise
        yield "replicas", flatten(state), f"{name}: "
    elif "tfevents" in path.name:
        yield "records", _events(path), f"{name.rpartition('/')[0]}: "
    elif path.name == "metrics.jsonl":
        yield from _metrics(path, name)
    elif path.name in ("settings.json", "_run.json"):
        values = json.loads(path.read_text())
        values.pop("version", None)
        yield "settings", flatten(values), f"{name}/"
    elif path.suffix == ".parquet":
        rows, meta, settings = _log(path)
        yield "log", {f"row {number}": row for number, row in enumerate(rows)}, f"{name}: "
        yield "log metadata", meta, f"{name}: "
        yield "settings", settings, f"{name}: "


def _is_replica(path: Path) -> bool:
    return "lossy_replicas" in path.parts


def digest(folder: Path, outcome: dict[str, Any], program: str) -> dict[str, Any]:
    """Return everything that is compared of a case.

    ``settings`` are flags on record, of which a later version may have more; all else must be equal.
    """
    result: dict[str, Any] = {"statuses": [], "errors": "", "console": [], "files": []}
    parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    for run in outcome["runs"]:
        result["statuses"].append(run["statuses"])
        result["console"] += _console(run["output"], program)
        if any(run["statuses"]):
            result["errors"] = run["errors"]
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        for part, values, before in _left(path, name):
            parts[part].update((before + key, value) for key, value in values.items())
        # Others may be divided among files, or named, otherwise.
        if path.is_file() and not (_is_replica(path) or path.suffix == ".distcp" or "tfevents" in name):
            result["files"].append(name)
    return result | parts
