"""Checks that ranks can find the tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import refuse


def check_tokenizer(name: str) -> None:
    """Raise :class:`UsageError` unless the tokenizer is on a disk.

    64 ranks must not fetch it at once, maybe without a network.
    """
    kind, _, source = name.partition(":")
    if kind == "sentencepiece" and not os.path.isfile(source):
        raise refuse("--tokenizer", name, "there is no such model file")
    if kind == "hf" and not os.path.isdir(source):
        cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub"))
        if not (cache.expanduser() / f"models--{source.replace('/', '--')}").is_dir():
            raise refuse(
                "--tokenizer",
                name,
                f"is neither a folder nor in {cache}; download it once, or give hf:FOLDER or sentencepiece:FILE",
            )
