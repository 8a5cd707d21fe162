"""Codes in blocks against a plain-NumPy reference, to the byte; their mean and variance; whatever is lost."""

import itertools
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base import native
from megatron_lossy.base.coding import block_bytes, compiled
from megatron_lossy.base.coding.blocks import BlockCode, uniforms
from megatron_lossy.base.exchange import cut
from tests.reference import block_payload, block_scale, block_values, hashed_uniforms

pytestmark = pytest.mark.shows("codes of 8 and 4 bits: bytes, mean and variance")

BLOCKS = (32, 64, 128, 256)
CODES = [BlockCode(bits, block) for bits in (8, 4) for block in BLOCKS]


def units_of(code, shard, packets):
    """The cut of a shard into packets of ``packets`` blocks; 0: one unit."""
    unit, elements = ("packet", code.block * packets) if packets else ("shard", None)
    [units], _ = cut([shard], [4], unit, 4096, elements=[elements])
    return units


def keys_of(*words):
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(-1, 2)


def by_reference(code, values, units, keys, first):
    """The payload of each row of ``values``, unit by unit."""
    rows = []
    for row, key in zip(values, keys if keys is not None else itertools.repeat(None), strict=False):
        payload = b""
        for number in range(units.count):
            start = number * units.elements
            unit = row[start : start + units.elements]
            words = None if key is None else [int(word) & 2**32 - 1 for word in key]
            u = None if words is None else hashed_uniforms(words, first + start, len(unit))
            payload += block_payload(unit, code.bits, code.block, u)
        rows.append(payload)
    return rows


SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e38, 2.0**-126, 127.0, -7.0, 1.0]


@settings(deadline=None, max_examples=150)
@given(
    code=st.sampled_from(CODES),
    rows=st.integers(1, 3),
    shard=st.integers(1, 700),
    packets=st.integers(0, 2),
    first=st.integers(0, 2**20).map(lambda number: 256 * number),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
    stochastic=st.booleans(),
    special=st.integers(0, 4),
    by_torch=st.booleans(),
)
def test_bytes_and_values_are_those_of_the_reference(
    code, rows, shard, packets, first, dtype, seed, stochastic, special, by_torch
):
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, shard)).astype(np.float32) * 10.0 ** random.integers(-30, 20, (rows, 1))
    for value in random.choice(SPECIAL, special):
        values[random.integers(rows), random.integers(shard)] = value
    tensor = torch.from_numpy(values).to(dtype)
    values, units = tensor.float().numpy(), units_of(code, shard, packets)
    keys = keys_of(*random.integers(-(2**31), 2**31, 2 * rows)) if stochastic else None
    with np.errstate(all="ignore"):
        expected = by_reference(code, values, units, keys, first)
        decoded = [
            np.concatenate([
                block_values(payload[k * size : (k + 1) * size], min(units.elements, shard - k * units.elements), code.bits, code.block)
                for k in range(units.count)
            ])
            for payload in expected
            for size in [code.size(units.elements)]
        ]  # fmt: skip
    served = (lambda *_: False) if by_torch else compiled.serves
    with mock.patch.object(compiled, "serves", served):
        got = code.encode(tensor, units, keys, first)
        out = code.decode(got, units, torch.full((rows, shard), 5.0))
        half = code.decode(got, units, torch.zeros(rows, shard, dtype=dtype))
        rounded = code.round_(tensor.float().clone(), units, keys, first)
        apart = code.round_(torch.cat([tensor, tensor], 1)[:, :shard], units, keys, first)  # rows with a gap between
    assert code.payloads(units).shard == got.shape[1] and code.payloads(units).count == units.count
    assert [row.numpy().tobytes() for row in got] == expected
    np.testing.assert_array_equal(out.view(torch.int32), np.array(decoded).view(np.int32))
    np.testing.assert_array_equal(rounded.view(torch.int32), out.view(torch.int32))
    largest = torch.finfo(dtype).max
    assert torch.equal(half.float().nan_to_num(), out.clamp(-largest, largest).to(dtype).float().nan_to_num())
    assert torch.equal(apart.nan_to_num(), half.nan_to_num())


@settings(deadline=None, max_examples=200)
@given(
    code=st.sampled_from(CODES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shares=st.lists(st.floats(-1, 1), min_size=1, max_size=min(BLOCKS) - 2),  # one block, with both tops
    top=st.floats(0.85, 1),
    stochastic=st.booleans(),
    seed=st.integers(0, 2**31),
    by_torch=st.booleans(),
)
def test_what_is_finite_stays_finite(code, dtype, shares, top, stochastic, seed, by_torch):
    """Up to the largest number of the type. All that does not end above it is the code times the scale, as ever."""
    largest = torch.finfo(dtype).max
    values = (torch.tensor([[*shares, top, -top]], dtype=torch.float64) * largest).to(dtype)
    assert values.isfinite().all()
    units = units_of(code, values.shape[1], 0)
    keys = keys_of(seed - 2**30, 7) if stochastic else None
    with mock.patch.object(compiled, "serves", (lambda *_: False) if by_torch else compiled.serves):
        payload = code.encode(values, units, keys)
        decoded = code.decode(payload, units, torch.empty_like(values))
        rounded = code.round_(values.clone(), units, keys)
    [codes] = code._unpacked(payload[:, None, 2:], values.shape[1]).double()
    exact = codes * float(block_scale(values.float().numpy(), code.most))
    expected = exact.clamp(-largest, largest).to(torch.float32).to(dtype)
    assert decoded.isfinite().all()
    assert torch.equal(decoded, expected) and torch.equal(rounded, expected)


@settings(deadline=None, max_examples=60)
@given(code=st.sampled_from(CODES), shard=st.integers(1, 2000), packets=st.integers(1, 2), seed=st.integers(0, 2**31))
def test_any_subset_of_units_decodes(code, shard, packets, seed):
    """For any lost bytes."""
    random = np.random.default_rng(seed)
    units, values = units_of(code, shard, packets), random.standard_normal((1, shard)).astype(np.float32)
    payload = code.encode(torch.from_numpy(values), units)
    whole = code.decode(payload, units, torch.empty(1, shard))
    arrived, size = random.random(units.count) < 0.5, code.size(units.elements)
    for number in np.flatnonzero(~arrived):
        part = payload[:, number * size : (number + 1) * size]
        part.copy_(torch.from_numpy(random.integers(0, 256, part.shape).astype(np.uint8)))
    got = code.decode(payload, units, torch.empty(1, shard))
    mine = np.repeat(arrived, units.elements)[:shard]
    np.testing.assert_array_equal(got[:, mine], whole[:, mine])


@pytest.mark.parametrize("code", CODES, ids=str)
def test_the_mean_is_the_value_and_the_variance_the_law(code):
    """Over keys: within 4 standard errors of x, and omega within 5 % of the sum of s^2 f (1 - f)."""
    keys, shard = 4000, 512
    values = torch.from_numpy(np.random.default_rng(3).standard_normal((1, shard)).astype(np.float32))
    units = units_of(code, shard, 0)
    draws = keys_of(*np.random.default_rng(4).integers(-(2**31), 2**31, 2 * keys))
    coded = code.round_(values.expand(keys, -1).clone(), units, draws).double()
    nearest = code.round_(values.clone(), units)
    scales = [block_scale(block, code.most) for block in values[0].numpy().reshape(-1, code.block)]
    scale = torch.from_numpy(np.repeat(scales, code.block)).double()
    exact = values[0].double()
    assert ((nearest[0].double() - exact).abs() <= 0.5001 * scale).all()
    assert ((coded - exact).abs() <= 1.0001 * scale).all() and (coded.abs() <= code.most * scale).all()
    f = exact / scale % 1
    variance = scale**2 * f * (1 - f)
    # An element whose f is near 0 or 1 may never go the other way; u has 16 bits.
    assert ((coded.mean(0) - exact).abs() < 4 * (variance / keys).sqrt() + scale * (4 / keys)).all()
    law = variance.sum() / (exact**2).sum()
    measured = ((coded - exact) ** 2).sum(1).mean() / (exact**2).sum()
    assert measured.item() == pytest.approx(law.item(), rel=0.05)


def test_uniforms_are_uniform_and_independent_between_keys_and_elements():
    keys = keys_of(*np.random.default_rng(5).integers(-(2**31), 2**31, 16))
    u = uniforms(keys, 0, 2**16).double()
    assert u.mean(1).numpy() == pytest.approx(np.full(8, 0.5), abs=4 * 12**-0.5 / 256)
    assert np.abs(np.corrcoef(u) - np.eye(8)).max() < 4 / 256
    for lag in (1, 2, 3):
        assert abs(np.corrcoef(u[0, lag:], u[0, :-lag])[0, 1]) < 4 / 256
    np.testing.assert_array_equal(uniforms(keys, 512, 100), u[:, 512:612])
    counts = np.bincount((u[0] * 256).long().numpy(), minlength=256)
    assert ((counts - 256) ** 2 / 256).sum() < 350  # chi-squared, 255 degrees: P below 1e-4


@pytest.mark.parametrize(("bits", "elements", "size"), [(8, 1280, 1300), (4, 2688, 1386)])
def test_a_datagram_of_1408_bytes(bits, elements, size):
    code = BlockCode(bits, 128)
    assert (code.elements(1408), code.size(elements)) == (elements, size)
    assert code.elements(block_bytes(code.bits, code.block) - 1) == 0


def test_the_page_has_the_elements_of_a_packet():
    rows = re.findall(r"\| int(\d), blocks of (\d+) \| ([\d,]+) elements", Path("docs/compression.md").read_text())
    assert len(rows) == 3
    for bits, block, elements in rows:
        assert BlockCode(int(bits), int(block)).elements(1408) == int(elements.replace(",", ""))


def test_with_a_compiler_compiled_codes_serve_tensors_in_one_piece():
    assert native.compiler() is None or compiled.serves(torch.zeros(1, 5))
    assert not compiled.serves(torch.zeros(5, 2).t())


@pytest.mark.programs
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (False, "--grad-wire, --param-wire: needs a C compiler to build the codes of a CPU once: install gcc"),
        (True, "cannot build the codes of a CPU"),
    ],
)
def test_without_a_compiler_that_works_a_line_says_that_torch_makes_codes(monkeypatch, tmp_path, caplog, broken, said):
    (tmp_path / "cc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "compiler", lambda: str(tmp_path / "cc") if broken else None)
    compiled.library.cache_clear()
    try:
        for _ in range(2):
            assert not compiled.serves(torch.zeros(1, 5))
        [record] = caplog.records
        assert said in record.message
    finally:
        compiled.library.cache_clear()
