"""Text to Megatron's indexed format, read back by megatron-core's own dataset classes."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lossy.data import build_tokenizer, check_dataset, read_description, stdlib_documents
from megatron_lossy.data.__main__ import run
from megatron_lossy.data.documents import validation_documents
from megatron_lossy.errors import UsageError

TOKENIZER = build_tokenizer("byte")


@given(st.binary(max_size=200))
def test_bytes_come_back(data):
    ids = TOKENIZER.encode(data)
    assert ids.tolist() == list(data) and TOKENIZER.eod == 256 and TOKENIZER.vocab_size == 257
    assert TOKENIZER.decode([*ids, TOKENIZER.eod]) == data.decode("utf-8", "replace")


def indexed(prefix):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [np.asarray(document).tolist() for document in IndexedDataset(str(prefix))]


def convert(*arguments):
    run([str(argument) for argument in arguments])


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "absent.txt"], "absent.txt"),
        (["--input", "empty.txt"], "empty"),
        (["--input", "empty.txt", "--tokenizer", "mystery"], "--tokenizer mystery"),
        (["--input", "empty.txt", "--stdlib"], "--stdlib"),
        ([], "--input"),
    ],
)
def test_wrong_input_is_named(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(UsageError, match=message):
        convert(*arguments, "--output-prefix", "data")
    assert not list(tmp_path.glob("data*"))


@given(st.sets(st.text(min_size=1), min_size=2, max_size=40), st.floats(0.01, 0.99))
def test_a_split_is_by_name(names, fraction):
    names = sorted(names)
    chosen = {names[i] for i in validation_documents(names, fraction)}
    assert 0 < len(chosen) < len(names)
    shuffled = names[::-1]
    assert {shuffled[i] for i in validation_documents(shuffled, fraction)} == chosen


def test_damaged_or_foreign_data_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    convert("--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "data")
    (tmp_path / "data.bin").write_bytes(b"")
    with pytest.raises(UsageError, match="data.bin has 0 bytes"):
        check_dataset(tmp_path / "data", TOKENIZER)
    with pytest.raises(UsageError, match="there is no"):
        check_dataset(tmp_path / "absent", TOKENIZER)


def test_the_standard_library_is_text_enough():
    documents = stdlib_documents()
    names = [name for name, _ in documents]
    assert names == sorted(names) and documents == stdlib_documents()
    assert sum(len(data) for _, data in documents) > 3_000_000
    assert not any(part in ("test", "tests", "site-packages") for name in names for part in name.split("/"))


def test_gpt_dataset_reads_it(tmp_path):
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    text = bytes(range(32, 127)) * 20
    (tmp_path / "a.txt").write_bytes(text)
    convert("--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "data")
    prefix = ([str(tmp_path / "data")], None)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=64,
        blend_per_split=[prefix, None, None],
        tokenizer=TOKENIZER,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
        path_to_cache=str(tmp_path / "cache"),
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [10, None, None], lambda: True, config).build()
    sample = train[0]
    tokens = sample["tokens"].tolist()
    assert bytes(tokens) in text and sample["labels"].tolist()[:-1] == tokens[1:]
