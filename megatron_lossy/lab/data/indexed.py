"""Megatron's indexed data sets, written by ``IndexedDatasetBuilder`` of megatron-core.

A data set of prefix P is ``P.bin`` (token ids), ``P.idx`` (the beginnings of documents) and our ``P.json``. The last
names the tokenizer and the source, so that training with another tokenizer is refused. Every document ends with the
tokenizer's end-of-document id. All three are written aside and renamed when they are complete.

Documents come from text files, JSON lines, or the source of Python's standard library. One is a pair of a name and its
bytes. Names are relative to the input they were found in. So neither the order of documents nor the choice of validation
documents depends on the place of the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...base.errors import UsageError, cannot, refuse
from ...base.files import aside_of, check_folder, publish, sync, writing
from .tokenizers import Tokenizer

Document = tuple[str, bytes]

# Left out: files that are not written to be read (tables, tests), or that differ between machines.
_STDLIB_LEFT_OUT = (
    "__pycache__ site-packages dist-packages test tests idle_test idlelib lib2to3 encodings pydoc_data turtledemo "
    "_bundled sitecustomize.py usercustomize.py"
)
_FORMAT = "megatron-lossy data set 1"


@dataclass
class DatasetDescription:
    """The content of ``P.json``. ``tokens`` counts end-of-document ids too; ``dtype`` is that of the ids in ``P.bin``.

    ``documents_sha256`` covers the bytes of all documents, in order.
    """

    tokenizer: str
    fingerprint: str
    vocab_size: int
    eod: int
    documents: int
    tokens: int
    dtype: str
    source_bytes: int
    documents_sha256: str


class _Writer:
    """Writes the data set ``prefix``. Nothing appears under ``prefix`` before :meth:`commit`."""

    def __init__(self, prefix: str, tokenizer: Tokenizer) -> None:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        self.prefix, self._tokenizer, self._sha256 = prefix, tokenizer, hashlib.sha256()
        dtype = DType.optimal_dtype(tokenizer.vocab_size)
        name, vocabulary = np.dtype(dtype).name, (tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.eod)
        self.description = DatasetDescription(tokenizer.name, *vocabulary, 0, 0, name, 0, "")
        with writing("--output-prefix", prefix):
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
            self._aside = aside_of(prefix)
            self._aside.mkdir()
            self._builder = IndexedDatasetBuilder(str(self._aside / "bin"), dtype=dtype)

    def close(self) -> None:
        """Remove the files that are not committed."""
        with contextlib.suppress(OSError):  # on a full disk it tries once more to write the rest
            self._builder.data_file.close()
        shutil.rmtree(self._aside, ignore_errors=True)

    def add(self, name: str, data: bytes) -> None:
        """Append one document. Raise :class:`UsageError` if the tokenizer cannot encode it."""
        try:
            ids = self._tokenizer.encode(data)
        except UnicodeDecodeError as error:
            why = f"is not UTF-8 (byte {error.start}); only --tokenizer byte takes any bytes"
            raise refuse("--input", name, why) from None
        with writing("--output-prefix", self.prefix):
            self._builder.add_document(np.append(ids, self._tokenizer.eod), [len(ids) + 1])
        self.description.documents += 1
        self.description.tokens += len(ids) + 1
        self.description.source_bytes += len(data)
        self._sha256.update(len(data).to_bytes(8, "little") + data)

    def complete(self) -> None:
        """Write the rest; once this returns, all is on disk. Raise :class:`UsageError` without a document."""
        if not self.description.documents:
            raise UsageError(f"--input: no document holds text, so that {self.prefix} would be empty")
        self.description.documents_sha256 = self._sha256.hexdigest()
        content = {"format": _FORMAT, **dataclasses.asdict(self.description)}
        with writing("--output-prefix", self.prefix):
            self._builder.finalize(str(self._aside / "idx"))
            (self._aside / "json").write_text(json.dumps(content, indent=2) + "\n")
            sync(self._aside)

    def commit(self) -> None:
        """Give the complete data set its name."""
        # The index goes first and comes last: a data set without one is incomplete to every reader, whereas an
        # old index with new tokens would be read without complaint. So would megatron-core's cached samples.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.prefix + ".idx")
        shutil.rmtree(os.path.join(self.prefix, "cache", "GPTDataset_indices"), ignore_errors=True)
        with writing("--output-prefix", self.prefix):
            for suffix in ("bin", "json", "idx"):
                publish(self._aside / suffix, f"{self.prefix}.{suffix}")


def write_indexed(
    documents: Iterable[Document],
    prefix: str | os.PathLike,
    tokenizer: Tokenizer,
    overwrite: bool = False,
    validation: set[int] | None = None,
) -> dict[str, DatasetDescription]:
    """Write ``documents`` as the data set ``prefix``; return descriptions by prefix.

    With ``validation``, the positions of documents, those go to ``prefix_valid`` and all others to ``prefix_train``.
    Raise :class:`UsageError` if one exists already and ``overwrite`` is false, if it cannot be written, if it has a
    ``.json`` file that is not ours, or if a document cannot be encoded.
    """
    with contextlib.ExitStack() as stack:
        writers = []
        for name in output_prefixes(os.fspath(prefix), validation is not None):
            check_output(name, overwrite)
            writers.append(_Writer(name, tokenizer))
            stack.callback(writers[-1].close)
        for position, document in enumerate(documents):
            writers[position in (validation or ())].add(*document)
        for writer in writers:
            writer.complete()
        for writer in writers:
            writer.commit()
    return {writer.prefix: writer.description for writer in writers}


def output_prefixes(prefix: str, split: bool) -> list[str]:
    """Return the data sets that are written under ``prefix``."""
    return [f"{prefix}_train", f"{prefix}_valid"] if split else [prefix]


def output_files(prefix: str) -> list[str]:
    """Return the files of the data set ``prefix``."""
    return [f"{prefix}.{suffix}" for suffix in ("bin", "idx", "json")]


def check_output(prefix: str, overwrite: bool) -> None:
    """Raise :class:`UsageError` unless the data set ``prefix`` may be written."""
    if not os.path.basename(prefix):
        raise refuse("--output-prefix", prefix, "must end with a name, to which .bin, .idx and .json are added")
    check_folder("--output-prefix", os.path.dirname(prefix) or ".")
    for file in filter(os.path.exists, output_files(prefix)):
        if not overwrite:
            raise refuse("--output-prefix", prefix, f"{file} exists already; give another, or --overwrite")
        if file.endswith(".json") and read_description(prefix) is None:
            raise refuse("--output-prefix", prefix, f"{file} is not the description of a data set; move it")


def read_description(prefix: str | os.PathLike) -> DatasetDescription | None:
    """Return the content of ``prefix.json``; None if there is none of ours (data of Megatron's own tools has none)."""
    try:
        content = json.loads(Path(f"{os.fspath(prefix)}.json").read_bytes())
        return DatasetDescription(**content) if content.pop("format") == _FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_weight(text: str) -> bool:
    """Return whether ``text`` is a weight between the prefixes of ``--data-path``."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_blend(flag: str, texts: Sequence[str]) -> None:
    """Raise :class:`UsageError` unless ``texts``, given with ``flag``, are prefixes, or each follows its weight."""
    weights = [float(text) for text in texts if is_weight(text)]
    paired = len(texts) == 2 * len(weights) and all(map(is_weight, texts[::2]))
    if weights and not (paired and min(weights) >= 0 and 0 < sum(weights) < math.inf):
        allowed = "must be prefixes, or each after its weight; no weight is negative, and not all are 0"
        raise refuse(flag, " ".join(texts), allowed)


def epochs(data_path: Sequence[str], tokens: int) -> float:
    """Return the number of times that ``tokens`` tokens of training read the data of ``--data-path``; the largest number.

    Raise :class:`UsageError` if there is no data set, or one without a token.
    """
    sizes = [_tokens(text) for text in data_path if not is_weight(text)]
    weights = [float(text) for text in data_path if is_weight(text)] or sizes
    return max(tokens * weight / sum(weights) / size for weight, size in zip(weights, sizes, strict=True))


# Bytes of a token by the code of its type in the .idx file.
_ITEMSIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


def _tokens(prefix: str, flag: str = "--data-path") -> int:
    """Return tokens of the data set ``prefix``, from the size of its file and the type in its index."""
    try:
        with open(prefix + ".idx", "rb") as index:
            head = index.read(18)  # magic, version, type
        tokens = os.path.getsize(prefix + ".bin") // _ITEMSIZES[head[17]]
    except OSError as error:
        raise cannot(flag, prefix, "read", error) from None
    except (IndexError, KeyError):
        raise refuse(flag, prefix, f"{prefix}.idx is not the index of a data set, or damaged") from None
    if not tokens:
        raise refuse(flag, prefix, f"{prefix}.bin holds no token")
    return tokens


def check_files(prefix: str | os.PathLike, flag: str = "--data-path") -> DatasetDescription | None:
    """Raise :class:`UsageError` unless ``prefix`` is a complete data set. Return the content of ``prefix.json``.

    Without a ``prefix.json`` of ours only the presence of the files is checked.
    """
    for file in output_files(os.fspath(prefix))[:2]:
        if not os.path.isfile(file):
            raise refuse(flag, prefix, f"there is no {file}; python -m megatron_lossy.data makes data sets")
        if not os.access(file, os.R_OK):
            raise refuse(flag, prefix, f"{file} cannot be read")
    if (description := read_description(prefix)) is not None:
        expected, size = description.tokens * np.dtype(description.dtype).itemsize, os.path.getsize(f"{prefix}.bin")
        if size != expected:
            raise refuse(flag, prefix, f"{prefix}.bin has {size} bytes, not the {expected} of {prefix}.json")
    return description


def check_dataset(prefix: str | os.PathLike, tokenizer: Tokenizer, flag: str = "--data-path") -> None:
    """Check as :func:`check_files`. Raise :class:`UsageError` also without tokens, or for another tokenizer."""
    description = check_files(prefix, flag)
    _tokens(os.fspath(prefix), flag)
    if description is not None and description.fingerprint != tokenizer.fingerprint:
        raise refuse("--tokenizer", tokenizer.name, f"{prefix} was made with --tokenizer {description.tokenizer}")


def find_files(inputs: Iterable[str]) -> list[tuple[str, Path]]:
    """Return the files that ``inputs`` (files, folders, globs) name: pairs of name and path, each once.

    Inputs keep their order. The files of a folder or glob are sorted by name, without hidden ones. Raise
    :class:`UsageError` for an input that does not exist, holds no file, or is an empty or unreadable file.
    """
    found: dict[Path, str] = {}
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            hidden = re.compile(r"(^|/)\.")
            root, matches = path, [p for p in path.rglob("*") if not hidden.search(p.relative_to(path).as_posix())]
        elif glob.has_magic(given) and not path.exists():
            literal = list(path.parts)[: next(i for i, part in enumerate(path.parts) if glob.has_magic(part))]
            root, matches = Path(*literal), [Path(p) for p in glob.glob(given, recursive=True)]
        else:
            root, matches = path.parent, [path]
            with _reading(path, "--input") as stream:
                if not stream.read(1):
                    raise refuse("--input", given, "is empty")
        if not (files := sorted((p.relative_to(root).as_posix(), p) for p in matches if p.is_file())):
            raise refuse("--input", given, "holds no file" if path.is_dir() else "matches no file")
        for name, file in files:
            found.setdefault(file.resolve(), name)
    return [(name, path) for path, name in found.items()]


def read_documents(
    files: Iterable[tuple[str, Path]],
    format: str = "text",
    json_key: str = "text",
    split_documents: str = "file",
    flag: str = "--input",
) -> Iterator[Document]:
    """Yield the documents of ``files``, in order; those without any text are left out.

    ``format``: ``text`` or ``jsonl`` (one document per line, under ``json_key``). ``split_documents``, for text:
    ``file`` (a file is a document) or ``blank-line`` (blank lines separate documents). A part of a file is called
    ``NAME:LINE``. Raise :class:`UsageError` that names ``flag``, file and line.
    """
    for name, path in files:
        with _reading(path, flag) as stream:
            if format == "jsonl":
                yield from _json_lines(name, path, stream, json_key, flag)
            elif split_documents == "blank-line":
                for is_text, lines in itertools.groupby(enumerate(stream, 1), lambda line: bool(line[1].strip())):
                    if is_text:
                        numbers, texts = zip(*lines, strict=True)
                        yield f"{name}:{numbers[0]}", b"".join(texts)
            elif (data := stream.read()).strip():
                yield name, data


def stdlib_documents() -> list[Document]:
    """Return the source files of the running Python's standard library, sorted by name: text every machine has.

    Tests, tables of data, installed packages and generated files are left out. Raise :class:`UsageError` if this
    Python comes without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    out, machine = set(_STDLIB_LEFT_OUT.split()), ("_sysconfigdata", "config-")
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [name for name in names if out.isdisjoint(name.parts) and not name.parts[0].startswith(machine)]
    documents = list(read_documents([(name.as_posix(), root / name) for name in kept], flag="--data"))
    if len(documents) < 2:
        raise refuse("--data stdlib:", root, "holds no source of Python's standard library")
    return sorted(documents)


def validation_documents(names: Sequence[str], fraction: float) -> set[int]:
    """Return the positions of the documents that go to validation: a share of ``fraction`` of them, at least one.

    These are the documents whose names have the lowest SHA-256. The choice is the same in every run, and nearly the
    same when documents are added. Raise :class:`UsageError` for fewer than two documents.
    """
    if len(names) < 2:
        raise refuse("--split", f"({len(names)} documents)", "needs at least 2; see --split-documents and --format")
    hashes = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names]
    order = sorted(range(len(names)), key=lambda i: (hashes[i], i))
    return set(order[: min(len(names) - 1, max(1, round(fraction * len(names))))])


def _json_lines(name: str, path: Path, stream: Iterable[bytes], key: str, flag: str) -> Iterator[Document]:
    for number, line in enumerate(stream, 1):
        try:
            data = json.loads(line)[key].encode() if line.strip() else b""
        except UnicodeError:
            raise refuse(flag, path, f"line {number} is not valid Unicode in UTF-8") from None
        except ValueError as error:
            raise refuse(flag, path, f"line {number} is not JSON: {error}") from None
        except (KeyError, TypeError, AttributeError):
            raise refuse(flag, path, f"line {number} holds no text under --json-key {key}") from None
        if data.strip():
            yield f"{name}:{number}", data


@contextlib.contextmanager
def _reading(path: Path, flag: str) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as stream:
            yield stream
    except OSError as error:
        raise cannot(flag, path, "read", error) from None
