"""``python -m megatron_lossy.data``: text files to Megatron's indexed format."""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from ...base.errors import ArgumentParser, refuse, usage_errors
from ...base.flags import hint_at_flags
from .indexed import (
    check_output,
    find_files,
    output_files,
    output_prefixes,
    read_documents,
    validation_documents,
    write_indexed,
)
from .tokenizers import NAMES, build_tokenizer, padded_vocab_size


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags. Raise :class:`UsageError`."""
    parser = ArgumentParser("python -m megatron_lossy.data", description="Text files to Megatron's indexed format.")
    add = parser.add_argument
    add("--input", nargs="+", metavar="PATH", help="text files, folders (every file in them but hidden ones) or globs")
    add("--output-prefix", metavar="PREFIX", help="write PREFIX.bin, PREFIX.idx and PREFIX.json")
    add("--tokenizer", default="byte", metavar="NAME", help=f"{NAMES}; byte, the default, takes any bytes")
    add("--format", default="text", choices=("text", "jsonl"), help="jsonl: a JSON object per line, a document each")
    add("--json-key", default="text", metavar="KEY", help="jsonl: the key of a document's text; default text")
    kinds = ("file", "blank-line")
    add("--split-documents", default="file", choices=kinds, help="text: a document is a file, or ends at a blank line")
    shares = "with these shares of the documents, chosen by a hash of their names; for example 0.95 0.05"
    both = f"write PREFIX_train and PREFIX_valid {shares}"
    add("--split", type=float, nargs=2, metavar=("TRAIN", "VALID"), help=both)
    add("--overwrite", action="store_true", help="replace data sets that exist already")
    hint_at_flags(parser)
    given = parser.parse_args(arguments)
    if not given.input:
        raise refuse("--input", "(none)", "give files, folders or globs")
    if given.output_prefix is None:
        raise refuse("--output-prefix", "(none)", "say where to write")
    if given.format == "jsonl" and given.split_documents != "file":
        raise refuse("--split-documents", given.split_documents, "needs --format text: jsonl has a document per line")
    if given.split is not None:
        positive = all(math.isfinite(share) and share > 0 for share in given.split)
        if not positive or not any(math.isclose(sum(given.split), whole) for whole in (1, 100)):
            why = "must be two positive numbers that add up to 1, or to 100"
            raise refuse("--split", "{:g} {:g}".format(*given.split), why)
    return given


@usage_errors("megatron_lossy.data")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; report wrong input as one line and exit status 2."""
    given, started = _read(arguments), time.monotonic()
    prefix, prefixes = given.output_prefix, output_prefixes(given.output_prefix, given.split is not None)
    for output in prefixes:
        check_output(output, given.overwrite)
    tokenizer = build_tokenizer(given.tokenizer)
    files = find_files(given.input)
    outputs = {Path(file).resolve() for output in prefixes for file in output_files(output)}
    for _, path in files:
        if path in outputs:
            raise refuse("--output-prefix", prefix, f"{path} is also an --input")
    how = given.format, given.json_key, given.split_documents
    # megatron-core warns at import about missing CUDA packages; writing data needs none of them.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    validation = None
    if given.split is not None:
        names = [name for name, _ in read_documents(files, *how)]
        validation = validation_documents(names, given.split[1] / sum(given.split))
    written = write_indexed(read_documents(files, *how), prefix, tokenizer, given.overwrite, validation)
    for output, data in written.items():
        size = f"{data.source_bytes:,} bytes, {data.tokens:,} tokens ({data.dtype})"
        print(f"{output}: {data.documents:,} documents, {size}")
    padded = f"padded by 128 to {padded_vocab_size(tokenizer.vocab_size)}; {time.monotonic() - started:.1f} s"
    print(f"tokenizer {tokenizer.name}: vocabulary {tokenizer.vocab_size}, {padded}")


if __name__ == "__main__":
    main()
