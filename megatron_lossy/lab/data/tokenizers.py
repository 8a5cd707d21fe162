"""Tokenizers by name: bytes, and those of transformers and sentencepiece, with what megatron-core's data sets read of them.

The byte tokenizer numbers its tokens like Megatron-LM's ``--tokenizer-type NullTokenizer --vocab-size 256``, so that
``pretrain_gpt.py`` can train on the same files.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ...base.errors import check_package, refuse

NAMES = "byte, hf:NAME_OR_PATH or sentencepiece:MODEL_FILE"


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids.

    ``name``: as given to :func:`build_tokenizer`. ``kind``: part of the names of megatron-core's cached sample indices.
    ``vocab_size``: ids are in ``[0, vocab_size)``, that of the end of a document, ``eod``, among them; not padded.
    ``encode``: the ids of text in UTF-8, integers[tokens], without ``eod``; raises :class:`UnicodeDecodeError` for other
    text, except that ``byte`` takes any bytes. ``vocabulary``: every id with its token, ascending.
    """

    name: str
    kind: str
    vocab_size: int
    eod: int
    encode: Callable[[bytes], np.ndarray]
    vocabulary: Callable[[], Iterable[tuple[int, str]]]
    # No id of the data means padding. megatron-core takes -1, too, when padding and EOD would collide.
    pad = -1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the vocabulary: equal for equal tokenizers, wherever their files are."""
        return hashlib.sha256(json.dumps([self.eod, *self.vocabulary()]).encode()).hexdigest()

    @property
    def unique_identifiers(self) -> OrderedDict:
        """Return values that identify this tokenizer, for the names of megatron-core's cached sample indices."""
        return OrderedDict({"class": self.kind, "vocab_size": self.vocab_size, "fingerprint": self.fingerprint})


def build_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer ``byte``, ``hf:NAME_OR_PATH`` or ``sentencepiece:MODEL_FILE``.

    Raise :class:`UsageError` if there is none, its package is not installed, or it has no end-of-sequence token.
    """
    kind, _, source = name.partition(":")
    if name == "byte":

        def of_bytes(data: bytes) -> np.ndarray:
            return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

        return Tokenizer(name, "ByteTokenizer", 257, 256, of_bytes, lambda: ((i, f"<0x{i:02X}>") for i in range(256)))
    if kind not in _LIBRARIES or not source:
        raise refuse("--tokenizer", name, f"must be {NAMES}")
    package, load = _LIBRARIES[kind]
    check_package(package, "--tokenizer", name, "'megatron-lossy[tokenizers]'")
    try:
        tokenizer = load(name, source)
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        hint = "; hf:FOLDER takes a folder with the tokenizer's files" if kind == "hf" else ""
        raise refuse("--tokenizer", name, f"cannot be loaded: {' '.join(str(error).split())}{hint}") from None
    if tokenizer.eod is None or tokenizer.eod < 0:
        raise refuse("--tokenizer", name, "has no end-of-sequence token, which must end a document")
    return tokenizer


def padded_vocab_size(vocab_size: int, divisible_by: int = 128, tensor_parallel: int = 1) -> int:
    """Return ``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel``, as Megatron pads it."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def _of_transformers(name: str, source: str) -> Tokenizer:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(source)

    def encode(data: bytes) -> np.ndarray:
        # verbose warns about texts longer than the model allows, and documents are longer.
        return np.array(loaded.encode(data.decode(), add_special_tokens=False, verbose=False), dtype=np.int32)

    def vocabulary() -> list[tuple[int, str]]:
        return sorted((i, token) for token, i in loaded.get_vocab().items())

    return Tokenizer(name, "HuggingFaceTokenizer", len(loaded), loaded.eos_token_id, encode, vocabulary)


def _of_sentencepiece(name: str, source: str) -> Tokenizer:
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_proto=Path(source).read_bytes())
    size = model.vocab_size()

    def encode(data: bytes) -> np.ndarray:
        return np.array(model.encode(data.decode()), dtype=np.int32)

    def vocabulary() -> Iterable[tuple[int, str]]:
        return enumerate(map(model.id_to_piece, range(size)))

    return Tokenizer(name, "SentencePieceTokenizer", size, model.eos_id(), encode, vocabulary)


_LIBRARIES = {"hf": ("transformers", _of_transformers), "sentencepiece": ("sentencepiece", _of_sentencepiece)}
