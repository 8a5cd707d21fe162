"""Sources of documents: text files, JSON lines, or the source of Python's standard library.

A document is a pair of a name and its bytes. Names are relative to the input they were found in. So neither the order
of documents nor the choice of validation documents depends on the place of the files.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ...base.errors import cannot, refuse

Document = tuple[str, bytes]

# Left out: files that are not written to be read (tables, tests), or that differ between machines.
_STDLIB_LEFT_OUT = (
    "__pycache__ site-packages dist-packages test tests idle_test idlelib lib2to3 encodings pydoc_data turtledemo "
    "_bundled sitecustomize.py usercustomize.py"
)


def find_files(inputs: Iterable[str], flag: str = "--input") -> list[tuple[str, Path]]:
    """Return the files that ``inputs`` (files, folders, globs), given as ``flag``, name: pairs of name and path, each once.

    Inputs keep their order. The files of a folder or glob are sorted by name, without hidden ones. Raises
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
            with _reading(path, flag) as stream:
                if not stream.read(1):
                    raise refuse(flag, given, "is empty")
        files = sorted((p.relative_to(root).as_posix(), p) for p in matches if p.is_file())
        if not files:
            raise refuse(flag, given, "holds no file" if path.is_dir() else "matches no file")
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
    ``NAME:LINE``. Raises :class:`UsageError` that names ``flag``, file and line.
    """
    for name, path in files:
        with _reading(path, flag) as stream:
            if format == "jsonl":
                yield from _json_lines(name, path, stream, json_key, flag)
            elif split_documents == "blank-line":
                yield from _paragraphs(name, stream)
            else:
                data = stream.read()
                if data.strip():
                    yield name, data


def stdlib_documents() -> list[Document]:
    """Return the source files of the running Python's standard library, sorted by name: text every machine has.

    Tests, tables of data, installed packages and generated files are left out. Raises :class:`UsageError` if this
    Python comes without its source.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    out, machine = set(_STDLIB_LEFT_OUT.split()), ("_sysconfigdata", "config-")
    names = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [name for name in names if out.isdisjoint(name.parts) and not name.parts[0].startswith(machine)]
    files = [(name.as_posix(), root / name) for name in kept]
    documents = list(read_documents(files, flag="--stdlib"))
    if len(documents) < 2:
        raise refuse("--stdlib", root, "holds no source of Python's standard library")
    return sorted(documents)


def validation_documents(names: Sequence[str], fraction: float) -> set[int]:
    """Return the positions of the documents that go to validation: a share of ``fraction`` of them, at least one.

    These are the documents whose names have the lowest SHA-256. The choice is the same in every run, and nearly the
    same when documents are added. Raises :class:`UsageError` for fewer than two documents.
    """
    if len(names) < 2:
        allowed = "needs at least 2; see --split-documents and --format"
        raise refuse("--split", f"({len(names)} documents)", allowed)
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


def _paragraphs(name: str, stream: Iterable[bytes]) -> Iterator[Document]:
    for is_text, lines in itertools.groupby(enumerate(stream, 1), lambda line: bool(line[1].strip())):
        if is_text:
            numbers, texts = zip(*lines, strict=True)
            yield f"{name}:{numbers[0]}", b"".join(texts)


@contextlib.contextmanager
def _reading(path: Path, flag: str) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb") as stream:
            yield stream
    except OSError as error:
        raise cannot(flag, path, "read", error) from None
