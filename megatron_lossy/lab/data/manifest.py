"""Manifests: the files that a run trains on, with hashes, so that a broken copy is found before it costs.

A manifest is a JSON file that names, relative to its own folder, the files of data sets (``.bin``, ``.idx``,
``.json``), each with its size and the SHA-256 of every block of 64 MiB. A quick check, as at the start of a run,
compares the sizes of all files, and reads the first and the last block of each file and up to eight between. A full
check reads everything.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base.errors import ArgumentParser, UsageError, cannot, refuse
from ...base.files import write_text, writing
from .indexed import check_files, is_weight, output_files

BLOCK = 64 * 2**20
_FORMAT = "megatron-lossy data manifest 1"
_SAMPLED = 8


def write_manifest(prefixes: Sequence[str], output: str, overwrite: bool = False) -> dict[str, Any]:
    """Hash the data sets ``prefixes`` into the file ``output``. Raises :class:`UsageError`."""
    target = Path(output)
    if target.exists() and not overwrite:
        raise refuse("--output", output, "exists already; give another, or --overwrite")
    files: dict[str, Any] = {}
    for prefix in prefixes:
        check_files(prefix, "PREFIX")
        for path in filter(Path.is_file, map(Path, output_files(prefix))):
            size = path.stat().st_size
            name = os.path.relpath(path.resolve(), target.parent.resolve())
            files[name] = {"bytes": size, "sha256": _hashes(path, range(_blocks(size)))}
    content = {"format": _FORMAT, "block_bytes": BLOCK, "files": files}
    with writing("--output", output):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, json.dumps(content, indent=1) + "\n")
    return content


def check_manifest(manifest: str, prefixes: Sequence[str] = (), full: bool = False) -> int:
    """Compare files with ``manifest``; return the number of bytes read.

    ``prefixes``: data sets that it must name. Raises :class:`UsageError` for the first file that differs.
    """

    def wrong(why: str) -> UsageError:
        return refuse("--data-manifest", manifest, why)

    files = {Path(manifest).parent / name: entry for name, entry in _read(manifest).items()}
    known = {path.resolve() for path in files}
    for named in (file for prefix in prefixes for file in output_files(prefix)[:2]):
        if Path(named).resolve() not in known:
            raise wrong(f"does not name {named}")
    for path, entry in files.items():
        if not path.is_file():
            raise wrong(f"names {path}, which is not there")
        if path.stat().st_size != entry["bytes"]:
            raise wrong(f"{path} has {path.stat().st_size} bytes, not the {entry['bytes']} it says")
    read = 0
    for path, entry in files.items():
        blocks = _chosen(len(entry["sha256"]), full)
        for block, found in zip(blocks, _hashes(path, blocks), strict=True):
            if found != entry["sha256"][block]:
                raise wrong(f"{path} differs in the 64 MiB from byte {block * BLOCK:,} on")
            read += min(BLOCK, entry["bytes"] - block * BLOCK)
    return read


def run_manifest(arguments: Sequence[str]) -> None:
    """Run ``python -m megatron_lossy.data manifest``."""
    parser = ArgumentParser("python -m megatron_lossy.data manifest", description="Hash data sets into a file.")
    parser.add_argument(
        "prefixes", nargs="+", metavar="PREFIX", help="PREFIX.bin, PREFIX.idx, and PREFIX.json if it is there"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="manifest; names are relative to its folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a manifest that exists already")
    given = parser.parse_args(arguments)
    prefixes = [prefix for prefix in given.prefixes if not is_weight(prefix)]
    content = write_manifest(prefixes, given.output, given.overwrite)
    total = sum(entry["bytes"] for entry in content["files"].values())
    print(f"{given.output}: {len(content['files'])} files, {total:,} bytes")


def run_check(arguments: Sequence[str]) -> None:
    """Run ``python -m megatron_lossy.data check``."""
    parser = ArgumentParser("python -m megatron_lossy.data check", description="Compare data sets with a manifest.")
    parser.add_argument("manifest", metavar="FILE")
    parser.add_argument("--full", action="store_true", help="read every byte, not only some blocks of each file")
    given = parser.parse_args(arguments)
    read = check_manifest(given.manifest, full=given.full)
    print(f"{given.manifest}: as it says; {read:,} bytes read")


def _blocks(size: int) -> int:
    return max(1, -(-size // BLOCK))


def _chosen(blocks: int, full: bool) -> list[int]:
    """Return the first block, the last, and up to eight evenly between."""
    if full or blocks <= _SAMPLED + 2:
        return list(range(blocks))
    return sorted({round(k * (blocks - 1) / (_SAMPLED + 1)) for k in range(_SAMPLED + 2)})


def _hashes(path: Path, blocks: Sequence[int]) -> list[str]:
    def digest(block: int) -> str:
        with open(path, "rb") as stream:
            stream.seek(block * BLOCK)
            return hashlib.sha256(stream.read(BLOCK)).hexdigest()

    try:
        # hashlib lets other threads run while it works.
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return list(pool.map(digest, blocks))
    except OSError as error:
        raise cannot("--data-manifest", path, "read", error) from None


def _read(manifest: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(manifest).read_bytes())
        if content["format"] != _FORMAT or content["block_bytes"] != BLOCK:
            raise ValueError
        files = dict(content["files"])
        if not all(len(entry["sha256"]) == _blocks(entry["bytes"]) for entry in files.values()):
            raise ValueError
    except OSError as error:
        raise cannot("--data-manifest", manifest, "read", error) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise refuse("--data-manifest", manifest, "must be a file of python -m megatron_lossy.data manifest") from None
    return files
