"""Tokenizers by name, with the attributes that megatron-core's dataset classes read.

``megatron.core.datasets.gpt_dataset`` (0.16) wants ``vocab_size``, ``eod``, ``pad`` and
``unique_identifiers``; a :class:`Tokenizer` can be passed as ``GPTDatasetConfig.tokenizer`` as it is. The byte
tokenizer numbers its tokens like Megatron-LM's ``--tokenizer-type NullTokenizer --vocab-size 256``, so that
``pretrain_gpt.py`` can train on the same files.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import ssl
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ...base.errors import UsageError, refuse

# Patience with the Hub.
_HUB_SECONDS = 5
# The errors of transformers if it has no tokenizer.
_FAILURES = (OSError, ValueError, KeyError)

NAMES = "byte, hf:NAME_OR_PATH or sentencepiece:MODEL_FILE"


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes: ``name`` (the name given to :func:`build_tokenizer`), ``vocab_size`` (ids are in ``[0, vocab_size)``,
    the end-of-document id ``eod`` among them; not padded), ``eod``.
    """

    name: str
    vocab_size: int
    eod: int
    # No id of the data means padding. megatron-core takes -1, too, when padding and EOD would collide.
    pad = -1

    @abstractmethod
    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids of ``text`` (bytes are UTF-8), int32 of shape ``[tokens]``, without ``eod``.

        Raises :class:`UnicodeDecodeError` for bytes that are not UTF-8; the byte tokenizer takes any bytes.
        """

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids; ``eod`` and ids that only pad the vocabulary give no text."""

    @abstractmethod
    def _vocabulary(self) -> Iterable[tuple[int, str]]:
        """Every id with its token, ascending."""

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

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < self.eod).decode(errors="replace")

    def _vocabulary(self) -> Iterable[tuple[int, str]]:
        return [(i, f"<0x{i:02X}>") for i in range(256)]


class HuggingFaceTokenizer(Tokenizer):
    """``transformers.AutoTokenizer`` of a name on the Hub or a folder. Its end-of-sequence token is ``eod``."""

    def __init__(self, source: str) -> None:
        self.name = f"hf:{source}"
        transformers = _optional("transformers", self.name)
        try:
            self._tokenizer = self._load(transformers.AutoTokenizer.from_pretrained, source)
        except UsageError:
            raise
        except _FAILURES as error:
            raise refuse("--tokenizer", self.name, f"cannot be loaded: {_one_line(error)}") from None
        if self._tokenizer.eos_token_id is None:
            raise refuse("--tokenizer", self.name, "has no end-of-sequence token, which must end a document")
        self.eod = self._tokenizer.eos_token_id
        self.vocab_size = len(self._tokenizer)

    def _load(self, load: Callable[..., Any], source: str) -> Any:
        if os.path.isdir(source):
            return load(source)
        try:
            return load(source, local_files_only=True)  # local files need no request
        except _FAILURES:
            self._check_hub(source)
            return load(source)

    def _check_hub(self, source: str) -> None:
        """Raise :class:`UsageError` if the Hub cannot have ``source``, or cannot be reached.

        transformers needs long to find that out.
        """
        folder = "hf:FOLDER takes a folder with the tokenizer's files, downloaded once"
        if source.startswith(("/", ".", "~")) or source.count("/") > 1:
            raise refuse("--tokenizer", self.name, f"there is no such folder; {folder}")
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        try:
            urllib.request.urlopen(hub, timeout=_HUB_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # it answers
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLError):  # it answers; transformers may trust more certificates than urllib
                return
            allowed = (
                f"is neither a folder nor in the cache, and {hub} cannot be reached ({_one_line(reason)}); {folder}"
            )
            raise refuse("--tokenizer", self.name, allowed) from None

    def encode(self, text: str | bytes) -> np.ndarray:
        # verbose warns about texts longer than the model allows, and documents are longer.
        ids = self._tokenizer.encode(_as_text(text), add_special_tokens=False, verbose=False)
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids if i < self.vocab_size and i != self.eod]
        return self._tokenizer.decode(known, clean_up_tokenization_spaces=False)

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

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.array(self._model.encode(_as_text(text)), dtype=np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if i < self.vocab_size and i != self.eod])

    def _vocabulary(self) -> Iterable[tuple[int, str]]:
        return [(i, self._model.id_to_piece(i)) for i in range(self.vocab_size)]


def build_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called ``name``: ``byte``, ``hf:NAME_OR_PATH`` or ``sentencepiece:MODEL_FILE``.

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
    """``vocab_size`` rounded up to a multiple of ``divisible_by * tensor_parallel``, as Megatron pads it."""
    multiple = divisible_by * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def _as_text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode()


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


def _optional(package: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise refuse(
            "--tokenizer",
            name,
            f"needs the package {package}: pip install 'megatron-lossy[tokenizers]' ({_one_line(error)})",
        ) from None
