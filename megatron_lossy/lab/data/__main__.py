"""``python -m megatron_lossy.data``: text files to Megatron's indexed format; ``manifest``, ``check``: hashes."""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...base.errors import ArgumentParser, refuse, usage_errors
from ...base.flags import add_flags, flag, from_namespace
from .documents import Document, find_files, read_documents, stdlib_documents
from .indexed import check_output, output_files, write_indexed, write_train_valid
from .tokenizers import NAMES, build_tokenizer, padded_vocab_size


@dataclass(frozen=True)
class DataConfig:
    """The input, its tokenizer, and the output. Raises :class:`UsageError`."""

    input: tuple[str, ...] | None = flag(
        None,
        "text files, folders (every file in them but hidden ones) or globs",
        type=str,
        nargs="+",
        metavar="PATH",
    )
    stdlib: bool = flag(False, "instead of --input: the source files of the running Python's standard library")
    output_prefix: str | None = flag(None, "write PREFIX.bin, PREFIX.idx and PREFIX.json", type=str, metavar="PREFIX")
    tokenizer: str = flag("byte", f"{NAMES}; byte takes any bytes", metavar="NAME")
    format: str = flag("text", "text, or jsonl: one JSON object per line, a document each", choices=("text", "jsonl"))
    json_key: str = flag("text", "jsonl: the key that holds a document's text", metavar="KEY")
    split_documents: str = flag(
        "file",
        "text: a file is a document, or blank lines separate documents",
        choices=("file", "blank-line"),
    )
    split: tuple[float, ...] | None = flag(
        None,
        "write PREFIX_train and PREFIX_valid with these shares of the documents, chosen by a hash of their names; "
        "for example 0.95 0.05",
        type=float,
        nargs=2,
        metavar=("TRAIN", "VALID"),
    )
    overwrite: bool = flag(False, "replace data sets that exist already")

    def __post_init__(self) -> None:
        if self.stdlib and self.input:
            raise refuse("--stdlib", "with --input", "give one of the two")
        if not self.stdlib and not self.input:
            raise refuse("--input", "(none)", "give files, folders or globs, or --stdlib")
        if self.output_prefix is None:
            raise refuse("--output-prefix", "(none)", "say where to write")
        if self.stdlib and (self.format, self.split_documents) != ("text", "file"):
            raise refuse("--stdlib", "with --format or --split-documents", "every source file is a document")
        if self.format == "jsonl" and self.split_documents != "file":
            allowed = "needs --format text: jsonl has a document per line"
            raise refuse("--split-documents", self.split_documents, allowed)
        if self.split is not None:
            positive = all(math.isfinite(share) and share > 0 for share in self.split)
            if not positive or not any(math.isclose(sum(self.split), whole) for whole in (1, 100)):
                why = "must be two positive numbers that add up to 1, or to 100"
                raise refuse("--split", "{:g} {:g}".format(*self.split), why)

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of the data sets to write."""
        if self.split is None:
            return [self.output_prefix]
        return [f"{self.output_prefix}_{split}" for split in ("train", "valid")]


def _with_progress(documents: Iterable[Document], verb: str, total: int) -> Iterator[Document]:
    """``documents``, with occasional lines on stderr if they take long. ``total``: bytes of all input."""
    rewrite = sys.stderr.isatty()
    started = time.monotonic()
    due = started + 2
    done = 0
    for document in documents:
        yield document
        done += len(document[1])
        now = time.monotonic()
        if now >= due:
            speed = done / 1e6 / (now - started)
            line = f"{verb} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {speed:.1f} MB/s"
            print("\r" + line if rewrite else line, end="" if rewrite else "\n", file=sys.stderr, flush=True)
            due = now + (1 if rewrite else 10)
    if rewrite and due > started + 2:
        print(file=sys.stderr)


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Raises :class:`UsageError`."""
    parser = ArgumentParser(
        "python -m megatron_lossy.data",
        description="Text files to Megatron's indexed format.",
        epilog="python -m megatron_lossy.data manifest|check --help: hashes of data sets, and their check.",
    )
    config = from_namespace(DataConfig, add_flags(parser, DataConfig, "data").parse_args(arguments))
    started = time.monotonic()
    for prefix in config.prefixes:
        check_output(prefix, config.overwrite)
    tokenizer = build_tokenizer(config.tokenizer)
    if config.stdlib:
        library = stdlib_documents()
        total = sum(len(data) for _, data in library)

        def documents() -> Iterable[Document]:
            return library

    else:
        files = find_files(config.input)
        total = sum(path.stat().st_size for _, path in files)
        outputs = {Path(file).resolve() for prefix in config.prefixes for file in output_files(prefix)}
        for _, path in files:
            if path in outputs:
                raise refuse("--output-prefix", config.output_prefix, f"{path} is also an --input")

        def documents() -> Iterable[Document]:
            return read_documents(files, config.format, config.json_key, config.split_documents)

    # megatron-core warns at import about missing CUDA packages; writing data needs none of them.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    if config.split is None:
        written = {
            config.output_prefix: write_indexed(
                _with_progress(documents(), "wrote", total), config.output_prefix, tokenizer, config.overwrite
            )
        }
    else:
        names = [name for name, _ in _with_progress(documents(), "read", total)]
        written = write_train_valid(
            _with_progress(documents(), "wrote", total),
            names,
            config.split[1] / sum(config.split),
            config.output_prefix,
            tokenizer,
            config.overwrite,
        )
    for prefix, data in written.items():
        size = f"{data.source_bytes:,} bytes, {data.tokens:,} tokens ({data.dtype})"
        print(f"{prefix}: {data.documents:,} documents, {size}")
    print(
        f"tokenizer {tokenizer.name}: vocabulary {tokenizer.vocab_size}, padded by 128 to "
        f"{padded_vocab_size(tokenizer.vocab_size)}; {time.monotonic() - started:.1f} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """:func:`run`, which reports wrong input as one line and exit status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    with usage_errors("megatron_lossy.data"):
        if arguments[:1] in (["manifest"], ["check"]):
            from . import manifest

            getattr(manifest, f"run_{arguments[0]}")(arguments[1:])
        else:
            run(arguments)


if __name__ == "__main__":
    main()
