"""Text to Megatron's indexed format, read back by megatron-core's own dataset classes."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.lab.data import (
    build_tokenizer,
    check_blend,
    check_dataset,
    epochs,
    padded_vocab_size,
    read_description,
    stdlib_documents,
    validation_documents,
    write_indexed,
)
from megatron_lossy.lab.data.__main__ import main
from tests.programs import ROOT, Program

pytestmark = pytest.mark.shows(
    "text to Megatron's indexed data and back, blends, damaged data",
    "tokenizers: bytes, SentencePiece, Hugging Face",
    device=False,
)

TOKENIZER = build_tokenizer("byte")


@given(st.binary(max_size=200))
def test_bytes_come_back(data):
    ids = TOKENIZER.encode(data)
    assert ids.tolist() == list(data) and TOKENIZER.eod == 256 and TOKENIZER.vocab_size == 257


@given(st.integers(1, 10**6), st.integers(1, 512), st.sampled_from([1, 2, 4, 8]))
def test_padding_is_the_next_multiple(size, divisor, tensor_parallel):
    padded = padded_vocab_size(size, divisor, tensor_parallel)
    assert padded % (divisor * tensor_parallel) == 0 and 0 <= padded - size < divisor * tensor_parallel


def indexed(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [np.asarray(document).tolist() for document in IndexedDataset(str(prefix))]


def convert(*arguments):
    main.__wrapped__([str(argument) for argument in arguments])  # which raises what main() prints


def test_files_become_documents(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "b.txt").write_bytes(b"second \xff")
    (text / "a.txt").write_bytes(b"first")
    convert("--input", text, "--output-prefix", tmp_path / "data")
    assert indexed(tmp_path / "data") == [[*b"first", 256], [*b"second \xff", 256]]
    described = read_description(tmp_path / "data")
    assert (described.documents, described.tokens, described.vocab_size) == (2, 15, 257)
    check_dataset(tmp_path / "data", TOKENIZER)
    with pytest.raises(UsageError, match="--overwrite"):
        convert("--input", text, "--output-prefix", tmp_path / "data")
    convert("--input", text / "a.txt", "--output-prefix", tmp_path / "data", "--overwrite")
    assert indexed(tmp_path / "data") == [[*b"first", 256]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx", "data.json", "text"]


def test_lines_and_paragraphs(tmp_path):
    lines, text = tmp_path / "lines.jsonl", tmp_path / "text.txt"
    lines.write_text("".join(json.dumps({"body": word}) + "\n" for word in ("one", "two")))
    convert("--input", lines, "--format", "jsonl", "--json-key", "body", "--output-prefix", tmp_path / "lines")
    assert indexed(tmp_path / "lines") == [[*b"one", 256], [*b"two", 256]]
    text.write_text("a\nb\n\n\nc\n")
    convert("--input", text, "--split-documents", "blank-line", "--output-prefix", tmp_path / "paragraphs")
    assert len(indexed(tmp_path / "paragraphs")) == 2
    with pytest.raises(UsageError, match="lines.jsonl.*1"):
        convert("--input", lines, "--format", "jsonl", "--output-prefix", tmp_path / "missing-key")


@given(st.sets(st.text(min_size=1), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_a_split_is_by_name(names, fraction):
    names = sorted(names)
    chosen = {names[i] for i in validation_documents(names, fraction)}
    assert 0 < len(chosen) < len(names)
    shuffled = names[::-1]
    assert {shuffled[i] for i in validation_documents(shuffled, fraction)} == chosen


def test_wrong_flags_cost_no_import_of_megatron():
    code = (
        "import sys; from megatron_lossy.lab.data.__main__ import main\n"
        "print('torch' in sys.modules); main(['--input', 'absent'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "False\n"
    assert len(done.stderr.splitlines()) == 1 and "--output-prefix" in done.stderr


def test_a_split_loses_no_document_and_repeats(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(20):
        (text / f"{i}.txt").write_text(f"document {i}")
    for name in ("once", "again"):
        convert("--input", text, "--output-prefix", tmp_path / name, "--split", 90, 10)
    train, valid = (indexed(tmp_path / f"once_{split}") for split in ("train", "valid"))
    assert len(valid) == 2
    assert sorted(train + valid) == sorted([*f"document {i}".encode(), 256] for i in range(20))
    for split in ("train", "valid"):
        for suffix in ("bin", "idx", "json"):
            once, again = (tmp_path / f"{name}_{split}.{suffix}" for name in ("once", "again"))
            assert once.read_bytes() == again.read_bytes()


def test_a_failed_overwrite_leaves_what_was_there(tmp_path):
    write_indexed([("old", b"old")], tmp_path / "data", TOKENIZER)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fails_midway():
        yield "new", b"new"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_indexed(fails_midway(), tmp_path / "data", TOKENIZER, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overwriting_spares_foreign_files_and_drops_cached_samples(tmp_path):
    (tmp_path / "data.json").write_text('{"my": "notes"}')
    with pytest.raises(UsageError, match="data.json is not the description"):
        write_indexed([("a", b"a")], tmp_path / "data", TOKENIZER, overwrite=True)
    assert (tmp_path / "data.json").read_text() == '{"my": "notes"}'
    (tmp_path / "corpus.bin").write_bytes(b"text")
    with pytest.raises(UsageError, match="is also an --input"):
        convert("--input", tmp_path / "*.bin", "--output-prefix", tmp_path / "corpus", "--overwrite")
    cached = tmp_path / "other" / "cache" / "GPTDataset_indices"
    cached.mkdir(parents=True)
    write_indexed([("a", b"a")], tmp_path / "other", TOKENIZER)
    assert not cached.exists()


def test_sentencepiece(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [line for _, data in stdlib_documents()[:20] for line in data.decode("utf-8", "ignore").splitlines()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "sp"), vocab_size=300, minloglevel=2
    )
    check_subwords(f"sentencepiece:{tmp_path / 'sp.model'}", tmp_path)


def test_hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    model.train_from_iterator(["def function(value): return value"], trainer)
    folder = str(tmp_path / "hf")
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>").save_pretrained(folder)
    check_subwords(f"hf:{folder}", tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=model).save_pretrained(folder)
    with pytest.raises(UsageError, match="no end-of-sequence token"):
        build_tokenizer(f"hf:{folder}")


def check_subwords(name, folder):
    tokenizer = build_tokenizer(name)
    text = b"def function(value): return value"
    ids = tokenizer.encode(text)
    assert 1 < len(ids) < len(text) and max(ids) < tokenizer.vocab_size
    write_indexed([("a", text)], folder / "data", tokenizer)
    assert indexed(folder / "data") == [[*ids, tokenizer.eod]]
    check_dataset(folder / "data", build_tokenizer(name))
    with pytest.raises(UsageError, match="--tokenizer byte: .* was made with"):
        check_dataset(folder / "data", TOKENIZER)
    with pytest.raises(UsageError, match="latin: is not UTF-8 .byte 1"):
        write_indexed([("latin", b"a\xff")], folder / "latin", tokenizer)


def test_a_name_that_cannot_be_loaded_names_folders(monkeypatch):
    def from_pretrained(name):
        raise OSError(f"We couldn't connect\nto load {name}")

    hub = types.SimpleNamespace(AutoTokenizer=types.SimpleNamespace(from_pretrained=from_pretrained), __spec__=True)
    monkeypatch.setitem(sys.modules, "transformers", hub)
    message = "hf:someone/something: cannot be loaded: We couldn't connect to load someone/something; hf:FOLDER takes"
    with pytest.raises(UsageError, match=message):
        build_tokenizer("hf:someone/something")


def test_epochs_of_blends(tmp_path):
    tokenizer = build_tokenizer("byte")
    for name, size in (("a", 99), ("b", 399)):
        write_indexed([(name, bytes(size))], tmp_path / name, tokenizer)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert epochs([a], 250) == 2.5
    assert epochs([a, b], 1000) == 2  # both as often
    assert epochs(["0.5", a, "0.5", b], 1000) == 5  # a more often than b
    (tmp_path / "b.bin").write_bytes(b"")
    for blend in ([b], [a, b], ["1", a, "0", b]):
        with pytest.raises(UsageError, match="--data-path .*b: .*b.bin holds no token"):
            epochs(blend, 1)
    (tmp_path / "a.idx").write_bytes(b"short")
    with pytest.raises(UsageError, match="a.idx is not the index of a data set"):
        epochs([a], 1)


@pytest.mark.parametrize("blend", ["0 a", "0 a 0 b", "-1 a 2 b", "nan a", "inf a", "1 a b", "a 1", "1"])
def test_weights_that_make_no_blend_are_refused(blend):
    with pytest.raises(UsageError, match=f"--data-path {blend}: must be prefixes, or each after its weight"):
        check_blend("--data-path", blend.split())


@pytest.mark.parametrize("blend", ["a", "a b", "0.5 a", "0 a 1 b"])
def test_blends(blend):
    check_blend("--data-path", blend.split())


@pytest.mark.parametrize(("name", "package"), [("hf:gpt2", "transformers"), ("sentencepiece:model", "sentencepiece")])
def test_an_absent_package_is_named(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(UsageError, match=f"--tokenizer {name}: needs the package {package}"):
        build_tokenizer(name)


def test_the_standard_library_is_text_enough():
    documents = stdlib_documents()
    names = [name for name, _ in documents]
    assert names == sorted(names) and documents == stdlib_documents()
    assert sum(len(data) for _, data in documents) > 3_000_000
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/"))


def test_processes_that_need_the_same_text_write_it_once(tmp_path):
    program = (
        "import os, sys\n"
        "from megatron_lossy.lab.train.arguments import configurations, make_parser, read_arguments\n"
        "from megatron_lossy.lab.train.data import with_data_paths, write_text\n"
        "given = ['--config', sys.argv[1], '--data', 'stdlib', '--data-cache-path', sys.argv[2]]\n"
        "paths = with_data_paths(configurations(read_arguments(make_parser('p', ''), given))[0])\n"
        "write_text(paths)\n"
        "print(*(os.stat(prefix + '.idx').st_ino for _, prefix in paths.data_sets()))\n"
    )
    (tmp_path / "writer.py").write_text(program)
    arguments = (ROOT / "configs/tiny/llama_1m.yaml", tmp_path / "cache")
    processes = [Program("writer", *arguments, folder=tmp_path) for _ in range(3)]
    outputs, errors = zip(*(process.communicate(timeout=200) for process in processes))
    assert all(process.returncode == 0 for process in processes), errors
    # The same files for all: nobody replaced what another one had already found complete.
    assert len(set(outputs)) == 1 and len(outputs[0].split()) == 2
