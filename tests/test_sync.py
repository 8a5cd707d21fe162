"""Exchanges of replicas: peers over gloo and in one process, fingerprints, classes, repairs, intervals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.fingerprint import COLUMNS, fingerprint, finite
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.replicas.repair import compare, largest_class, majority, outside, repair
from megatron_lossy.mechanisms.replicas.synchroniser import Interval, relative
from megatron_lossy.transport.peers import LocalPeers, RankPeers
from tests.ranks import run_ranks

pytestmark = pytest.mark.shows(
    "fingerprints, majorities and repairs, in one process and over gloo",
    "intervals of synchronisation: fixed, the paper's, ours",
)


def _rows(number):
    return {
        "int64": np.array([number, -(2**62) - number, 2**63 - 1 - number], dtype=np.int64),
        "float64": np.array([number / 3, np.nan, -np.inf]),
    }


def _tensor(number, dtype=torch.float32):
    return torch.randn(1001, generator=torch.Generator().manual_seed(number)).to(dtype)


def _everything(peers):
    """Return the results of the methods for the local replicas."""
    found = {name: peers.gather(np.stack([_rows(n)[name] for n in peers.local])) for name in _rows(0)}
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [_tensor(n, dtype) for n in peers.local]
        handle = peers.sum_(tensors)
        handle.wait()
        handle.wait()
        found[f"sum {dtype}"] = [tensor.float().numpy() for tensor in tensors]
        tensors = [_tensor(n, dtype) for n in peers.local]
        peers.broadcast_(tensors, peers.size - 1).wait()
        found[f"broadcast {dtype}"] = [tensor.float().numpy() for tensor in tensors]
    return found


def _of_rank(rank):
    return _everything(RankPeers(None))


@pytest.mark.parametrize("size", [2, 3])
def test_one_process_is_as_many(size):
    ranks, local = run_ranks(_of_rank, size), _everything(LocalPeers(size))
    for name, expected in local.items():
        for number, rank in enumerate(ranks):
            if "torch" not in name:
                assert rank[name].dtype == expected.dtype and rank[name].tobytes() == expected.tobytes()
            elif name.startswith("broadcast") or size == 2:
                assert np.array_equal(rank[name][0], expected[number])
            else:  # in another order
                assert np.allclose(rank[name][0], expected[number], atol=0.05 if "bfloat16" in name else 1e-6)
                assert np.array_equal(rank[name][0], ranks[0][name][0])


def test_local_sums_go_from_the_first_to_the_last():
    tensors = [torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-24)]
    LocalPeers(3).sum_(tensors)
    assert [float(tensor) for tensor in tensors] == [1.0] * 3  # the small ones first would give more
    tensors = [torch.tensor([value]) for value in (2.0**-24, 2.0**-24, 1.0)]
    LocalPeers(3).sum_(tensors)
    assert [float(tensor) for tensor in tensors] == [1 + 2.0**-23] * 3


def _splitmix64(word):
    mask = 2**64 - 1
    word = (word + 0x9E3779B97F4A7C15) & mask
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & mask
    return word ^ word >> 31


def _reference(array):
    """The fingerprint of one buffer, in Python integers."""
    data = array.tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype="<u8")
    rows = len(words) // COLUMNS
    matrix, rest = words[: rows * COLUMNS].reshape(rows, COLUMNS), words[rows * COLUMNS :].tolist()
    columns = matrix.sum(axis=0, dtype=np.uint64).tolist() if rows else []
    parts = ((columns, 0), (rest, COLUMNS), (matrix.sum(axis=1, dtype=np.uint64).tolist(), 2 * COLUMNS))
    golden = 0x9E3779B97F4A7C15
    total = array.size + sum(
        _splitmix64(word ^ (first + k) * golden % 2**64) for words, first in parts for k, word in enumerate(words)
    )
    return _splitmix64(total % 2**64)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8191, 8192, 8193, 3 * 8192 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_a_fingerprint_is_that_of_the_definition(length, dtype):
    values = torch.randn(length, generator=torch.Generator().manual_seed(length)).mul(50).to(dtype)
    raw = values.view(torch.int16).numpy() if dtype == torch.bfloat16 else values.numpy()
    assert int(fingerprint([values])) % 2**64 == _reference(raw)


@given(length=st.integers(1, 30000), data=st.data())
@settings(deadline=None, max_examples=60)
def test_what_differs_in_one_place_or_in_order_is_seen(length, data):
    """Any bit, blocks that change places, blocks of zeros; where the buffer starts in memory does not matter."""
    values = torch.randn(length, generator=torch.Generator().manual_seed(length))
    whole = int(fingerprint([values]))
    place, bit = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 31))
    flipped = values.clone()
    flipped.view(torch.int32)[place] ^= (1 << bit) - (2**32 if bit == 31 else 0)
    assert int(fingerprint([flipped])) != whole
    cut = data.draw(st.integers(0, length - 1))
    if not torch.equal(values.roll(cut), values):
        assert int(fingerprint([values.roll(cut)])) != whole
    zeroed = values.clone()
    zeroed[cut:] = 0
    assert int(fingerprint([zeroed])) != whole
    offset = torch.cat([torch.zeros(1), values])[1:]
    assert int(fingerprint([offset])) == whole
    parts = list(values.split([cut, length - cut]))
    assert int(fingerprint(parts)) != int(fingerprint(parts[::-1])) or not cut


def test_what_is_finite():
    ones = torch.ones(10)
    assert finite([ones, torch.arange(3), torch.zeros(0)]) and finite([])
    for value in (torch.inf, -torch.inf, torch.nan):
        for dtype in (torch.float32, torch.bfloat16):
            assert not finite([ones, torch.tensor([1.0, value, 2.0], dtype=dtype)])


@pytest.mark.parametrize(
    ("fingerprints", "expected"),
    [([7, 7], 0), ([7, 8], None), ([8, 7, 7], 1), ([7, 7, 8, 8], None), ([9, 7, 8, 8, 7, 8], 2), ([1, 2, 3], None)],
)
def test_the_largest_class(fingerprints, expected):
    assert largest_class(np.array(fingerprints)) == expected


@pytest.mark.parametrize(
    ("fingerprints", "whole", "expected"),
    [
        ([7, 7], [1, 1], 0),
        ([7, 7, 8, 8], [1, 1, 1, 1], None),
        ([8, 7, 7], [1, 1, 1], 1),
        ([7, 7, 7], [0, 1, 1], 1),
        ([7, 7, 8], [0, 1, 1], None),
        ([7, 8, 9], [0, 0, 0], None),
    ],
)
def test_the_majority_is_of_all_and_finite(fingerprints, whole, expected):
    assert majority(np.array(fingerprints), np.array(whole, dtype=bool)) == expected


def buckets(received):
    """Return, for each replica and bucket, its tensors: one."""
    return [[[one] for one in own] for own in received]


def _received(size, count=3):
    return [[_tensor(bucket) for bucket in range(count)] for _ in range(size)]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("hit", [*range(0, 32, 5), 31, "inf", "nan"])
def test_a_majority_is_right_bit_for_bit(size, hit):
    clean, received = _received(1)[0], _received(size)
    for bucket in range(3):
        victim = received[bucket % size][bucket]
        if isinstance(hit, str):
            victim[17 * bucket] = float(hit)
        else:
            victim.view(torch.int32)[17 * bucket] ^= (1 << hit) - (2**32 if hit == 31 else 0)
    peers = LocalPeers(size)
    compared = compare(peers, buckets(received))
    assert [outside(found) for found in compared.values()] == [[0], [1], [2]] and list(compared) == [0, 1, 2]
    assert repair(peers, buckets(received), compared) == dict.fromkeys(range(3), "majority")
    assert all(torch.equal(one, right) for own in received for one, right in zip(own, clean))
    assert compare(peers, buckets(received)) == repair(peers, buckets(received), {}) == {}


def test_all_tensors_of_a_bucket_are_compared_and_repaired():
    """Gradients outside the buffer: of other dtypes and shapes, and hit where the buffer is not."""
    own = [[[_tensor(0).bfloat16(), _tensor(1)[:12].view(3, 4)], [_tensor(2)]] for _ in range(3)]
    own[2][0][1][1, 2] = 7.0
    clean = own[0][0][1].clone()
    compared = compare(LocalPeers(3), own)
    assert list(compared) == [0] and outside(compared[0]) == [2]
    assert repair(LocalPeers(3), own, compared) == {0: "majority"}
    assert all(torch.equal(one[0][1], clean) for one in own) and compare(LocalPeers(3), own) == {}
    for number, one in enumerate(own):
        one[0][0][4], one[0][1][0, 0] = number, (torch.inf, 1.0, 3.0)[number]
    assert repair(LocalPeers(3), own, compare(LocalPeers(3), own)) == {0: "mean"}
    assert all((one[0][0][4], one[0][1][0, 0]) == (1.5, 2.0) for one in own)  # of the two that are finite


def test_two_that_are_hit_alike_at_different_places_are_no_majority():
    """Three replicas, two flips of one bit: all three differ, and the mean is all that is left."""
    received = _received(3, 1)
    for number, place in ((0, 5), (1, 800)):
        received[number][0].view(torch.int32)[place] ^= 1 << 20
    mean = (received[0][0] + received[1][0] + received[2][0]) / 3
    assert repair(LocalPeers(3), buckets(received), compare(LocalPeers(3), buckets(received))) == {0: "mean"}
    assert all(torch.equal(own[0], mean) for own in received)


def test_without_a_majority_the_finite_ones_are_averaged():
    received = [[_tensor(number)] for number in range(4)]
    received[1][0][3] = torch.nan
    mean = (received[0][0] + received[2][0] + received[3][0]) / 3
    assert repair(LocalPeers(4), buckets(received), compare(LocalPeers(4), buckets(received))) == {0: "mean"}
    assert all(torch.equal(own[0], mean) for own in received)
    for own, value in zip(received, (torch.inf, torch.nan, -torch.inf, torch.nan)):
        own[0][:] = _tensor(0)
        own[0][int(value == torch.inf)] = value
    received[3][0][9] = 1
    repair(LocalPeers(4), buckets(received), compare(LocalPeers(4), buckets(received)))
    assert compare(LocalPeers(4), buckets(received)) == {} and not finite(received[0])


def interval(rule, start=10, **flags):
    return Interval(LossyConfig(param_sync_interval=start, param_sync_rule=rule, **flags))


@pytest.mark.parametrize(
    ("k", "r", "expected"),
    [(10, 0.1, 10), (10, 0.2, 5), (10, 0.05, 20), (10, 0.0, 40), (10, 1e-9, 40), (10, 9.0, 3), (400, 0.0, 1000),
     (1, 9.0, 1), (10, float("inf"), 3), (10, 0.0999, 10)],
)  # fmt: skip
def test_the_rule_divergence(k, r, expected):
    rule = interval("divergence", k)
    rule.arrived(k, r * r, 1.0, None)
    assert rule.current == expected and isinstance(rule.current, int)


@pytest.mark.parametrize(
    ("gradient", "divergence", "expected"),
    [
        (4.0, 1.0, 2),
        (1.0, 0.0, 1000),
        (1.0, 100.0, 1),
        (1e9, 1.0, 1000),
        (5.0, float("inf"), 1),
        (float("inf"),) * 2 + (1,),
    ],
)
def test_the_rule_snr(gradient, divergence, expected):
    rule = interval("snr")
    rule.arrived(7, divergence, 1.0, gradient)
    assert rule.current == expected and rule.needs_gradient
    assert not interval("fixed").needs_gradient and not interval("divergence").needs_gradient


def test_fixed_intervals_stay():
    rule = interval("fixed")
    rule.arrived(10, 99.0, 1.0, None)
    assert rule.current == 10
    assert relative(0.0, 0.0) == 0 and relative(1.0, 0.0) == np.inf == relative(np.inf, np.inf)


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("start", [1, 10, 300])
def test_our_rule_settles_where_the_paper_s_would_not(power, start):
    """Divergence ~ k^a: within ten synchronisations r is the tolerance, up to what rounding H leaves."""
    wanted = 30
    rule = interval("divergence", start)
    for _ in range(10):
        r = 0.1 * (rule.current / wanted) ** power
        rule.arrived(rule.current, r * r, 1.0, None)
    assert abs(rule.current - wanted) <= 1
    other, seen = interval("snr", start), []
    for _ in range(30):
        other.arrived(other.current, (other.current / wanted) ** (2 * power), 1.0, wanted**2)
        seen.append(other.current)
    assert (len(set(seen[-6:])) > 1) == (power >= 1 and start != 30)
