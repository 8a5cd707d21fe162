"""Tokenizers by name: bytes, Hugging Face's and SentencePiece's, with the attributes that megatron-core's data sets read.

The byte tokenizer numbers its tokens like Megatron-LM's ``--tokenizer-type NullTokenizer --vocab-size 256``, so that
``pretrain_gpt.py`` can train on the same files.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import ModuleType

import numpy as np

from ...base.errors import refuse

NAMES = "byte, hf:NAME_OR_PATH or sentencepiece:MODEL_FILE"


class Tokenizer(ABC):
    """Text to token ids.

    Attributes: ``name`` (the name given to :func:`build_tokenizer`), ``vocab_size`` (ids are in ``[0, vocab_size)``,
    the end-of-document id ``eod`` among them; not padded), ``eod``.
    """

    name: str
    vocab_size: int
    eod: int
    # No id of the data means padding. megatron-core takes -1, too, when padding and EOD would collide.
    pad = -1

    @abstractmethod
    def encode(self, data: bytes) -> np.ndarray:
        """Return the ids of ``data``, text in UTF-8, as int32[tokens], without ``eod``.

        Raises :class:`UnicodeDecodeError` for bytes that are not UTF-8; the byte tokenizer takes any bytes.
        """

    @abstractmethod
    def _vocabulary(self) -> Iterable[tuple[int, str]]:
        """Return every id with its token, ascending."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the vocabulary: equal for equal tokenizers, wherever their files are."""
        return hashlib.sha256(json.dumps([self.eod, *self._vocabulary()]).encode()).hexdigest()

    @property
    def unique_identifiers(self) -> OrderedDict:
        """Values that tell this tokenizer from others, for the names of megatron-core's cached sample indices."""
        return OrderedDict(
            [("class", type(self).__name__), ("vocab_size", self.vocab_size), ("fingerprint", self.fingerprint)]
        )


class ByteTokenizer(Tokenizer):
    """Every byte is a token, 0 to 255; 256 ends a document."""

    name = "byte"
    vocab_size = 257
    eod = 256

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def _vocabulary(self) -> Iterable[tuple[int, str]]:
        return [(i, f"<0x{i:02X}>") for i in range(256)]


class HuggingFaceTokenizer(Tokenizer):
    """``transformers.AutoTokenizer`` of a name on the Hub or a folder. Its end-of-sequence token is ``eod``."""

    def __init__(self, source: str) -> None:
        self.name = f"hf:{source}"
        load = _optional("transformers", self.name).AutoTokenizer.from_pretrained
        try:
            self._tokenizer = load(source)
        except (OSError, ValueError, KeyError) as error:
            why = f"cannot be loaded: {_one_line(error)}; hf:FOLDER takes a folder with the tokenizer's files"
            raise refuse("--tokenizer", self.name, why) from None
        if self._tokenizer.eos_token_id is None:
            raise refuse("--tokenizer", self.name, "has no end-of-sequence token, which must end a document")
        self.eod = self._tokenizer.eos_token_id
        self.vocab_size = len(self._tokenizer)

    def encode(self, data: bytes) -> np.ndarray:
        # verbose warns about texts longer than the model allows, and documents are longer.
        ids = self._tokenizer.encode(data.decode(), add_special_tokens=False, verbose=False)
        return np.array(ids, dtype=np.int32)

    def _vocabulary(self) -> Iterable[tuple[int, str]]:
        return sorted((i, token) for token, i in self._tokenizer.get_vocab().items())


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model file. Its end-of-sequence piece is ``eod``."""

    def __init__(self, file: str) -> None:
        self.name = f"sentencepiece:{file}"
        sentencepiece = _optional("sentencepiece", self.name)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=Path(file).read_bytes())
        except (OSError, RuntimeError) as error:
            raise refuse("--tokenizer", self.name, f"cannot be loaded: {_one_line(error)}") from None
        self.eod = self._model.eos_id()
        if self.eod < 0:
            raise refuse("--tokenizer", self.name, "has no end-of-sequence piece, which must end a document")
        self.vocab_size = self._model.vocab_size()

    def encode(self, data: bytes) -> np.ndarray:
        return np.array(self._model.encode(data.decode()), dtype=np.int32)

    def _vocabulary(self) -> Iterable[tuple[int, str]]:
        return [(i, self._model.id_to_piece(i)) for i in range(self.vocab_size)]


def build_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer ``byte``, ``hf:NAME_OR_PATH`` or ``sentencepiece:MODEL_FILE``.

    Raises :class:`UsageError` if there is none, its package is not installed, or it has no end-of-sequence token.
    """
    kind, _, source = name.partition(":")
    if name == "byte":
        return ByteTokenizer()
    if kind == "hf" and source:
        return HuggingFaceTokenizer(source)
    if kind == "sentencepiece" and source:
        return SentencePieceTokenizer(source)
    raise refuse("--tokenizer", name, f"must be {NAMES}")


def padded_vocab_size(vocab_size: int, divisible_by: int = 128, tensor_parallel: int = 1) -> int:
    """Return ``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel``, as Megatron pads it."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _optional(package: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        why = f"needs the package {package}: pip install 'megatron-lossy[tokenizers]' ({_one_line(error)})"
        raise refuse("--tokenizer", name, why) from None
