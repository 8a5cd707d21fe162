"""Channels: keyed draws, rates, bursts, links, traces.

Statistical tests use fixed seeds; each states how unlikely a failure would be for a right implementation.
"""

import dataclasses
import hashlib
import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import KINDS, Exchange, Stream
from megatron_lossy.channel import make_channel
from megatron_lossy.channel.draws import Uniforms
from megatron_lossy.channel.gilbert_elliott import GilbertElliott
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import trace
from megatron_lossy.transport import Network, check_channels
from tests.rules import delivered, delivered_among

pytestmark = pytest.mark.shows(
    "losses are a function of seed, phase, step, link and unit",
    "rates, Gilbert-Elliott bursts, schedules, rates per link, traces",
    "receivers that lose together; reliable links within a node",
    device=False,
)

SIX_SIGMA = 6.0  # two-sided probability of a false alarm: 2e-9


def exchange(phase="grad", step=0, **stream):
    return Exchange(phase, Stream(**stream), step)


def assert_rate(lost, rate, sigmas=SIX_SIGMA):
    """The share of True in ``lost`` is ``rate`` within ``sigmas`` standard errors of independent draws."""
    error = np.sqrt(rate * (1 - rate) / lost.size)
    assert abs(lost.mean() - rate) <= sigmas * error, (lost.mean(), rate, error)


def assert_uncorrelated(a, b):
    """Correlation of two long 0/1 vectors within six standard errors (1/sqrt(n)) of zero."""
    assert abs(np.corrcoef(a, b)[0, 1]) < SIX_SIGMA / np.sqrt(a.size)


# --- draws ---------------------------------------------------------------------------------------------------------


def philox4x64(counter, key):
    """Philox4x64-10 as Salmon et al. define it, in Python integers."""
    word, mask = list(counter), 2**64 - 1
    k0, k1 = key
    for _ in range(10):
        p0, p1 = word[0] * 0xD2E7470EE14C6C93, word[2] * 0xCA5A826395121157
        word = [(p1 >> 64) ^ word[1] ^ k0, p1 & mask, (p0 >> 64) ^ word[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return word


@given(
    seed=st.integers(0, 2**64 - 1),
    phase=st.sampled_from(["grad", "param"]),
    step=st.integers(0, 2**40),
    source=st.integers(0, 2**20),
    destination=st.integers(0, 2**20),
    kind=st.sampled_from(["dense", "expert", "boundary"]),
    expert=st.integers(0, 2**16 - 1),
    stage=st.integers(0, 2**16 - 1),
    chunk=st.integers(0, 2**16 - 1),
)
def test_draws_are_philox_of_the_packed_key(seed, phase, step, source, destination, kind, expert, stage, chunk):
    """Each part has bits of its own, so that links, steps, phases and streams are independent."""
    key = exchange(phase, step, kind=kind, expert_rank=expert, stage=stage, chunk=chunk)
    drawn = Uniforms(seed, 1, key, [source], [destination], 5).upper[0]
    word = (phase == "param") << 56 | KINDS.index(kind) << 48 | expert << 32 | stage << 16 | chunk
    expected = []
    for block in (1, 2):  # NumPy counts up before the first block
        for value in philox4x64((block, step, source << 32 | destination, word), (seed, 2)):
            expected += [value >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
    assert drawn.tolist() == expected[:5]


def test_lower_bits_of_draws_are_pinned():
    """They decide the few comparisons that upper bits leave open. 16 units of links 0 to 1, 1 to 0, 2 to 3 and 3 to all."""
    drawn = Uniforms(7, 1, exchange("grad", 5), [0, 1, 2], [1, 0, 3], 16)
    found = [drawn._lower(link, unit) for link in range(3) for unit in range(16)]
    alike = Uniforms(7, 1, exchange("grad", 5), [3], None, 16)
    found += [alike._lower(0, unit) for unit in range(16)]
    digest = hashlib.sha256(" ".join(f"{number:08x}" for number in found).encode()).hexdigest()
    assert digest == "815bac4dc5c793de38980cf1aa296fa3eaf9fe928fc4f39579ba6cc5f0de6e8c"
    assert len(set(found)) == 64


def test_draws_do_not_depend_on_order_or_on_what_was_asked():
    calls = list(itertools.product(("grad", "param"), range(3), range(3), range(3)))
    config = LossyConfig(p_grad=0.3, p_param=0.3)

    def draw(order):
        networks = {phase: Network(config, phase, 3) for phase in ("grad", "param")}
        return {
            (phase, step, a, b): delivered(networks[phase], exchange(phase, step), a, b, 50).tobytes()
            for phase, step, a, b in order
        }

    shuffled = random.Random(0).sample(calls, len(calls))
    assert draw(calls) == draw(shuffled)


@pytest.mark.parametrize("rate", [1e-5, 0.003, 0.1, 1 / 3, 0.4, 0.999])
def test_rate(rate):
    lost = Uniforms(7, 0, exchange(), [0], [1], 4_000_000).below(rate)
    assert_rate(lost, rate)


def test_comparisons_have_48_bits():
    draws = Uniforms(7, 0, exchange(), [0], [1], 2_000_000)
    base = 12345 / 65536
    tie = draws.upper == 12345
    assert not draws.below(base)[tie].any()
    assert draws.below(12346 / 65536)[tie].all()
    assert_rate(draws.below(base + 0.5 / 65536)[tie], 0.5)
    assert (draws.below(base) <= draws.below(base + 0.3 / 65536)).all()  # monotone


# --- Gilbert-Elliott -----------------------------------------------------------------------------------------------


def ge(p=0.2, burst=5.0, seed=3, **options):
    return LossyConfig(loss_model=(f"gilbert-elliott:{burst}",), p_grad=p, loss_seed=seed, **options)


def burst_lengths(lost):
    """Lengths of runs of True that begin and end inside the vector."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], lost.astype(int), [0]])))
    return (edges[1::2] - edges[::2])[1:-1]


@pytest.mark.parametrize(("p", "burst"), [(0.1, 2.0), (0.4, 8.0), (0.5, 1.0 / 0.55), (0.05, 1.0)])
@pytest.mark.parametrize("units", [1, 7, 100_000])
def test_gilbert_elliott_rate_and_burst_length(p, burst, units):
    """Both within 6 standard errors; that of the rate is corrected for the chain's correlation."""
    channel = make_channel(ge(p, burst), "grad")
    steps = min(5_000, 400_000 // units)
    lost = ~np.concatenate([delivered(channel, exchange(step=step), 0, 1, units) for step in range(steps)])
    to_good, to_bad = 1 / burst, p / (1 - p) / burst
    memory = 1 - to_good - to_bad
    assert_rate(lost, p, SIX_SIGMA * np.sqrt((1 + memory) / (1 - memory)))
    lengths = burst_lengths(lost)
    assert abs(lengths.mean() - burst) <= SIX_SIGMA * lengths.std() / np.sqrt(lengths.size) + 1e-9


def reference_chain(channel, phase, stream, source, destination, units, steps):
    """The chain run forward from its start, unit by unit, with the same uniform numbers."""
    lost = []
    to_bad, to_good, *_ = channel.parameters(0)
    start = Exchange(phase, stream, 0)
    bad = bool(channel.uniforms(3, start, [source], [destination], 1).below(to_bad / (to_bad + to_good))[0, 0])
    for step in range(steps):
        to_bad, to_good, loss_good, loss_bad = channel.parameters(step)
        key = Exchange(phase, stream, step)
        chain = channel.uniforms(1, key, [source], [destination], units)
        loss = channel.uniforms(2, key, [source], [destination], units)
        up, stay = chain.below(to_bad)[0], chain.below(1 - to_good)[0]
        good_loss, bad_loss = loss.below(loss_good)[0], loss.below(loss_bad)[0]
        for unit in range(units):
            bad = bool(stay[unit] if bad else up[unit])
            lost.append(bad_loss[unit] if bad else good_loss[unit])
    return np.array(lost).reshape(steps, units)


@settings(max_examples=40, deadline=None)
@example(parameters=(1.0, 1.0, 0.0, 0.9), units=1, seed=0, order=random.Random(0))  # it alternates, and forgets nothing
@example(parameters=(1.0, 1.0, 0.0, 0.9), units=1, seed=1, order=random.Random(0))  # from the other state
@example(parameters=(1.0, 1.0, 0.0, 0.9), units=3, seed=0, order=random.Random(1))
@example(parameters=(0.95, 0.95, 0.1, 0.9), units=1, seed=2, order=random.Random(2))
@example(parameters=(0.02, 0.02, 0.0, 0.9), units=1, seed=3, order=random.Random(3))  # it stays, for long
@given(
    parameters=st.tuples(st.floats(0.0, 1.0), st.floats(0.01, 1.0), st.floats(0.0, 0.5), st.floats(0.0, 0.9)),
    units=st.integers(1, 5),
    seed=st.integers(0, 1000),
    order=st.randoms(use_true_random=False),
)
def test_gilbert_elliott_looks_back_exactly(parameters, units, seed, order):
    """In any order of asking, with a fresh channel or not, it equals the chain run from its start."""
    config = LossyConfig(loss_model=("gilbert-elliott:" + ",".join(map(str, parameters)),), loss_seed=seed)
    channel = make_channel(config, "grad")
    expected = ~reference_chain(channel, "grad", Stream(), 2, 5, units, 30)
    steps = list(range(30))
    order.shuffle(steps)
    for step in steps:
        assert np.array_equal(delivered(channel, exchange(step=step), 2, 5, units), expected[step])
    fresh = make_channel(config, "grad")
    assert np.array_equal(delivered(fresh, exchange(step=29), 2, 5, units), expected[29])


def test_gilbert_elliott_follows_a_schedule():
    config = LossyConfig(loss_model=("gilbert-elliott:3",), loss_schedule=("0:0.3,200:0,400:0.3",))
    channel = make_channel(config, "grad")
    lost = [~delivered(channel, exchange(step=step), 0, 1, 50) for step in range(600)]
    assert not np.concatenate(lost[200:400]).any()
    assert 0.2 < np.concatenate(lost[400:]).mean() < 0.4
    fresh = make_channel(config, "grad")
    assert isinstance(fresh, GilbertElliott)
    assert np.array_equal(~delivered(fresh, exchange(step=599), 0, 1, 50), lost[599])


# --- links ---------------------------------------------------------------------------------------------------------


def everything(config, size, steps=200, units=20, phase="grad", nodes=None):
    """bool[steps, source, destination, units] delivered."""
    network = Network(config, phase, size, nodes)
    return np.array([delivered_among(range(size), network, exchange(phase, t), units) for t in range(steps)])


def test_the_own_shard_always_arrives_unless_lossy_self():
    diagonal = np.arange(4)
    assert everything(LossyConfig(p_grad=0.5), 4)[:, diagonal, diagonal].all()
    config = LossyConfig(p_grad=0.5, p_param=0.5, lossy_self=True)
    assert_rate(~everything(config, 4)[:, diagonal, diagonal], 0.5)
    assert everything(config, 4, phase="param")[:, diagonal, diagonal].all()


def test_what_receivers_lose_together_is_drawn_for_no_rank():
    """Else a sender that loses for all would lose what one of its links loses in a run without correlation."""
    config = LossyConfig(p_grad=0.5, loss_unit="packet")
    together = everything(dataclasses.replace(config, loss_correlation="source"), 4, units=64)
    apart = everything(config, 4, units=64)
    for source, one, other in itertools.product(range(4), repeat=3):
        if source not in (one, other):
            assert (together[source, one] != apart[source, other]).any()


def test_a_phase_without_a_matrix_is_never_late(tmp_path):
    path = tmp_path / "rates.txt"
    path.write_text("0 .1\n.2 0\n")
    config = LossyConfig(loss_model=(f"per-link:{path}", "bernoulli"))
    assert make_channel(config, "param").lag(0, 0, np.array([1]), 1) == (0.0, 0.0)
    assert make_channel(config, "grad").lag(0, 0, np.array([1]), 1)[0] == 0.1


def test_receivers_that_lose_together():
    delivered = everything(LossyConfig(p_grad=0.5, loss_correlation="source"), 4)
    remote = delivered[:, 0, 1:]
    assert (remote == remote[:, :1]).all()
    assert_uncorrelated(delivered[:, 0, 1].ravel(), delivered[:, 2, 1].ravel())
    apart = everything(LossyConfig(p_grad=0.5), 4)
    assert_uncorrelated(apart[:, 0, 1].ravel(), apart[:, 0, 2].ravel())


def test_links_within_a_node_are_reliable():
    delivered = everything(LossyConfig(p_grad=0.5, lossy_links="inter-node"), 4, nodes=[0, 0, 1, 1])
    assert delivered[:, 0, 1].all() and delivered[:, 3, 2].all()
    assert_rate(~delivered[:, :2, 2:], 0.5)


def test_per_link_rates(tmp_path):
    rates = np.array([[0, 0.1, 0.5], [0.3, 0, 0], [0.9, 0.2, 0.7]])
    text, binary = tmp_path / "rates.txt", tmp_path / "rates.npy"
    text.write_text("# source x destination\n0, 0.1, 0.5\n0.3 0 0\n\n0.9 0.2 0.7\n")
    np.save(binary, rates)
    for path in (text, binary):
        config = LossyConfig(loss_model=(f"per-link:{path}", "bernoulli"), lossy_self=True)
        lost = ~everything(config, 3)
        for a, b in itertools.product(range(3), repeat=2):
            assert_rate(lost[:, a, b], rates[a, b])
        check_channels(config, 3, None)
        with pytest.raises(UsageError, match="3 x 3, but the dense group has 4 ranks"):
            check_channels(config, 4, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 1\n0 0\n", "row 0, column 1 is 1.0"),
        ("0 nan\n0 0", "nan"),
        ("0 0\n", "square"),
        ("0 x\n0 0", "x"),
        ("", "square"),
    ],
)
def test_wrong_matrices(tmp_path, text, message):
    path = tmp_path / "rates.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        check_channels(LossyConfig(loss_model=(f"per-link:{path}", "bernoulli")), 2, None)
    with pytest.raises(UsageError, match="absent.txt"):
        check_channels(LossyConfig(loss_model=(f"per-link:{tmp_path / 'absent.txt'}", "bernoulli")), 2, None)


def test_a_trace_replays_what_another_model_lost(tmp_path):
    recorded = everything(ge(), 3, steps=10, units=4)
    path = tmp_path / "trace.npz"
    np.savez(path, **{"grad": recorded, "param": recorded, "grad.dense-e0-s1-c0": ~recorded})
    config = LossyConfig(loss_model=("trace",), trace=str(path))
    assert np.array_equal(everything(config, 3, steps=10, units=4), recorded)
    staged = delivered(Network(config, "grad", 3), exchange(stage=1), 0, 1, 4)
    assert np.array_equal(staged, ~recorded[0, 0, 1])
    check_channels(config, 3, 10)
    for size, steps, message in ((4, 10, "3 ranks"), (3, 11, "10 steps in phase grad, the run needs 11")):
        with pytest.raises(UsageError, match=message):
            check_channels(config, size, steps)


def test_a_circular_trace_serves_any_run_packet_by_packet(tmp_path):
    """Each link has its own sequence, steps follow one another, and it begins again; phases begin at other places."""
    sequence = np.random.default_rng(1).random((3, 3, 1009)) < 0.8
    np.savez(tmp_path / "trace.npz", sequence=sequence)
    config = LossyConfig(loss_model=("trace",), trace=str(tmp_path / "trace.npz"))
    check_channels(config, 3, 10**9)
    network = Network(config, "grad", 3)
    found = np.concatenate([delivered(network, exchange(step=step), 0, 2, 7) for step in range(300)])
    [first] = [place for place in range(1009) if np.array_equal(np.roll(sequence[0, 2], -place)[:200], found[:200])]
    assert np.array_equal(found, np.resize(np.roll(sequence[0, 2], -first), len(found)))
    assert not np.array_equal(everything(config, 3, 9, 7), everything(config, 3, 9, 7, phase="param"))
    with pytest.raises(UsageError, match="is of 3 ranks, but the group has 4"):
        check_channels(config, 4, None)


def test_a_measurement_becomes_a_circular_trace(tmp_path, capsys):
    """By hand: packets in order, numbers of those that arrived, and links; all links of a sequence lose as much."""
    csv, out = tmp_path / "link.csv", tmp_path / "trace.npz"

    def made(text):
        csv.write_text(text)
        trace.main([str(csv), "--out", str(out)])
        return np.load(out)["sequence"].astype(int).tolist()

    assert made("arrived\n1\n0\n1\n") == [[[1, 0, 1]]]
    assert made("sequence\n65533\n65535\n1\n0\n") == [[[1, 0, 1, 1, 1]]]  # of 16 bits
    assert made("time,sequence\n.1,7\n.2,9\n.3,8\n.4,12\n.4,12\n") == [[[1, 1, 1, 0, 0, 1]]]
    links = made("source,destination,arrived\n0,1,1\n1,0,0\n0,1,0\n0,1,1\n")
    assert links == [[[1, 1, 1], [1, 0, 1]], [[0, 0, 0], [1, 1, 1]]]
    made("arrived\n" + "1\n1\n1\n0\n" * 250)
    assert "a link has 1,000 packets, 25 % are lost" in capsys.readouterr().out
    config = LossyConfig(loss_model=("trace",), trace=str(out))
    remote = everything(config, 4, steps=100, units=10)[:, ~np.eye(4, dtype=bool)]
    assert remote.mean(axis=(0, 2)).tolist() == [0.75] * 12
    for text in ("", "arrived\n", "other\n1\n", "arrived\nyes\n", "source,arrived\n0,1\n", "sequence\n-1\n"):
        with pytest.raises(UsageError, match="link.csv: must have a heading"):
            made(text)


def test_unreadable_traces(tmp_path):
    path = tmp_path / "trace.npz"
    for content in (b"", b"no archive"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="--trace"):
            check_channels(LossyConfig(loss_model=("trace",), trace=str(path)), 2, None)
    np.savez(path, grad=np.ones((5, 2, 2, 1)))
    with pytest.raises(UsageError, match="bool"):
        check_channels(LossyConfig(loss_model=("trace",), trace=str(path)), 2, None)
