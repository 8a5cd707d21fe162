"""The protocol of the UDP engine, without sockets and without a clock: what every datagram does, and when what ends."""

import ctypes
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base import native
from megatron_lossy.transport.udp.library import RULES, SECOND
from tests import udp_packet as packet
from tests import udp_world
from tests.udp_models import Source
from tests.udp_packet import (
    ALIVE,
    ASK,
    CODES,
    DATA,
    END,
    NACK,
    PROBE,
    READY,
    REPORT,
    encode,
)
from tests.udp_world import CHANNEL, MS, Node, World, fields_of, load

pytestmark = pytest.mark.shows(
    "codec, cipher, completion and rate against their models in every order",
    device=False,
)

UNIT = 64
BUCKETS = {"grad": [(10 * UNIT - 7, UNIT), (3 * UNIT, UNIT)], "param": [(5 * UNIT, UNIT)]}


def pieces(rank, size, shard, step=0):
    """Return the data that ``rank`` sends to each destination."""
    generator = np.random.default_rng([rank, step, shard])
    return generator.integers(0, 256, (size, shard), np.uint8)


@pytest.fixture
def pair():
    """A node of two that is fed by hand; the other one, rank 1, is the test."""
    node = Node(0, 2, BUCKETS)
    yield node
    node.close()


def data(unit, payload=None, number=0, **fields):
    payload = bytes([unit]) * (UNIT - 7 if unit == 9 else UNIT) if payload is None else payload
    return encode(DATA, payload, source=1, channel=CHANNEL, index=unit, number=number, **fields)


# ---- The datagram ----


@given(
    version=st.sampled_from([packet.VERSION] * 4 + [0, 1, 3, 15]),
    kind=st.integers(0, 15),
    tag=st.integers(0, 255),
    source=st.integers(0, 3),
    channel=st.sampled_from([CHANNEL, CHANNEL + 1, 0]),
    number=st.sampled_from([0, 1, 77, 2**20, 2**63, 2**64 - 1]),
    bucket=st.integers(0, 3),
    phase=st.integers(0, 3),
    zero=st.sampled_from([0] * 4 + [1, 0x10, 0xFF]),
    index=st.sampled_from([0, 1, 2, 3, 9, 10, 11, 2**32 - 1]),
    size=st.sampled_from([0, 1, 40, UNIT - 7, UNIT, UNIT + 1]),
    step=st.integers(0, 1),
)
@settings(max_examples=400, deadline=None)
def test_what_the_numpy_codec_writes_is_read_by_the_engine(size, version, kind, **fields):
    """And the engine takes exactly what fits what was agreed."""
    node = Node(0, 2, BUCKETS)
    datagram = encode(kind, bytes(size), version=version, **fields)
    verdict = node.handle(SECOND, 1, datagram)
    index, phase, bucket = fields["index"], fields["phase"], fields["bucket"]
    well_formed = version == packet.VERSION and DATA <= kind <= ASK and fields["tag"] >> 3 < len(CODES)
    well_formed &= fields["zero"] == 0
    if not well_formed:
        assert verdict == "malformed"
    elif fields["channel"] != CHANNEL or fields["source"] != 1:
        assert verdict == "foreign"
    else:
        fits = fields["number"] < 2**20 and fields["tag"] < 8  # values here are raw
        if kind in (DATA, END, READY, NACK, ASK):
            fits &= phase < 2 and bucket < (2, 1)[phase] if phase < 2 else False
            if fits:
                shard, unit = BUCKETS[("grad", "param")[phase]][bucket]
                units = -(-shard // unit)
                fits = {
                    DATA: index < units and size == min(unit, shard - index * unit),
                    END: index == units and size == 0,
                    READY: index <= 1 and size == 0,
                    NACK: False,  # of buckets with reports
                    ASK: index == 0 and size == 0,
                }[kind]
        else:
            fits &= not (phase or bucket or fields["step"])
            fits &= {
                REPORT: index == 0 and size == packet.REPORT_PAYLOAD.itemsize,
                ALIVE: index <= 2 and size == 0,
                PROBE: index <= 2 and size <= 64,
            }[kind]
        if fits:
            assert verdict in ("taken", "early")
        else:
            assert verdict == "malformed"
    node.close()


def test_what_the_engine_writes_is_read_by_the_numpy_codec(pair):
    """Every field of every type, in the order of the wire."""
    sent = pieces(0, 2, BUCKETS["grad"][0][0])
    pair.post(SECOND, "grad", 7, 0)
    pair.send("grad", 7, 0, sent)
    pair.handle(SECOND, 1, data(0, step=7))
    datagrams = [datagram for _, datagram in pair.produce_all(SECOND)]
    pair.timers(SECOND + 3 * MS)
    datagrams += [datagram for _, datagram in pair.produce_all(SECOND + 3 * MS)]
    kinds, numbers = [], []
    got = b""
    for datagram in datagrams:
        version, kind, fields, payload = packet.decode(datagram)
        assert (version, fields["tag"], fields["source"], fields["channel"]) == (packet.VERSION, 0, 0, CHANNEL)
        kinds.append(kind)
        numbers.append(fields["number"])
        if kind == DATA:
            assert fields["index"] * UNIT == len(got)
            got += payload
        if kind in (DATA, END, READY):
            assert (fields["step"], fields["bucket"], fields["phase"]) == (7, 0, 0)
        if kind == END:
            assert fields["index"] == 10 and payload == b""
        if kind == READY:
            assert fields["index"] == 0 and payload == b""
        if kind == REPORT:
            report = np.frombuffer(payload, packet.REPORT_PAYLOAD, 1)[0]
            assert (report["datagrams"], report["bytes"], report["top"]) == (1, 28 + UNIT, 1)
            assert (report["window"], report["limit"]) == (pair.window, pair.window)
            assert report["since"] == 3000 and report["clock"] == 1_000_000
    assert got == sent[1].tobytes()
    assert numbers == list(range(len(numbers)))
    assert kinds[:12] == [READY] + 10 * [DATA] + [END]
    assert {REPORT, ALIVE} <= set(kinds[12:])


@pytest.mark.parametrize("cut", [0, 1, 27])
def test_a_truncated_header_is_malformed(pair, cut):
    assert pair.handle(SECOND, 1, data(0)[:cut]) == "malformed"


def test_numbers_that_no_window_allows_are_refused(pair):
    """Otherwise one datagram could end all reports."""
    pair.post(SECOND, "grad", 0, 0)
    assert pair.handle(SECOND, 1, data(0, number=2**20)) == "malformed"
    assert pair.handle(SECOND, 1, data(0, number=2**20 - 1)) == "taken"
    assert pair.handle(SECOND, 1, data(1, number=2**21 - 1)) == "taken"


def test_a_report_of_what_was_never_sent_is_malformed(pair):
    report = packet.report(5, 100, top=1)
    assert pair.handle(SECOND, 1, encode(REPORT, report, source=1, channel=CHANNEL)) == "malformed"


def test_a_replayed_report_or_alive_does_nothing(pair):
    alive = encode(ALIVE, source=1, channel=CHANNEL, number=4)
    assert pair.handle(SECOND, 1, alive) == "taken"
    assert pair.handle(SECOND, 1, alive) == "late"


# ---- The cipher ----


def test_what_is_sealed_is_opened_and_nothing_else_is():
    with World(2, BUCKETS, cipher=True) as world:
        first, second = world.nodes
        second.post(world.now, "grad", 0, 0)
        sent = pieces(0, 2, BUCKETS["grad"][0][0])
        first.send("grad", 0, 0, sent)
        datagrams = [d for _, d in first.produce_all(world.now) if fields_of(d)[0] == DATA]
        exchange = second.exchanges["grad", 0, 0]
        generator = random.Random(1)
        for datagram in datagrams:
            for _ in range(50):
                forged = bytearray(datagram)
                forged[generator.randrange(len(forged))] ^= 1 << generator.randrange(8)
                assert second.handle(world.now, 0, bytes(forged)) in ("bad tag", "malformed", "foreign")
        assert not exchange.arrived[0].any() and (exchange.pieces == 0xEE).all()
        assert second.counters(0)["bad_tag"] > 100
        for datagram in datagrams:
            assert sent[1].tobytes()[:16] not in datagram
            assert second.handle(world.now, 0, datagram) == "taken"
        assert (exchange.pieces[0, : sent.shape[1]] == sent[1]).all()


@pytest.fixture(scope="module")
def short_epochs(tmp_path_factory):
    """An engine whose keys change with each 32 datagrams."""
    compiler = native.compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("engine") / "short.so"
    udp_world.HOOKED.compile(compiler, path, ["-DEPOCH_BITS=5"])
    return udp_world.declared(path)


@pytest.mark.parametrize("both", [True, False])
def test_keys_change_with_each_epoch_of_numbers(both, short_epochs, monkeypatch):
    """Datagrams of neighbouring epochs come in any order. An engine that keeps the first key opens none of a later epoch."""
    nodes = [Node(0, 2, BUCKETS, cipher=True)]
    with monkeypatch.context() as patch:
        patch.setattr(udp_world, "load", lambda: short_epochs)
        nodes.append(Node(1, 2, BUCKETS, cipher=True))
        if both:
            nodes[0].close()
            nodes[0] = Node(0, 2, BUCKETS, cipher=True)
    random_ = random.Random(1)

    def link(source, destination, datagram, now):
        return [now + random_.randrange(1, 5) * MS // 4]

    with World(2, BUCKETS, nodes=nodes, link=link) as world:
        for step in range(8):
            for node in nodes:
                node.post(world.now, "grad", step, 0, deadline=100 * MS)
                node.send("grad", step, 0, pieces(node.rank, 2, BUCKETS["grad"][0][0]))
            exchanges = [node.exchanges["grad", step, 0] for node in nodes]
            world.run(lambda: all(one.over_at is not None for one in exchanges))  # noqa: B023
            if both:
                assert all(one.arrived[1 - node.rank].all() for node, one in zip(nodes, exchanges))
        wrong = [node.counters(1 - node.rank)["bad_tag"] for node in nodes]
        assert wrong == [0, 0] if both else min(wrong) > 10


# ---- Completion ----


def follow(node, step, deadline, events, now, must=None):
    """Drive the engine and the model with the same events; they agree after each. Return the time after them."""
    model = Source(3, MS, deadline or None)  # in nanoseconds, which are exact
    exchange = None
    for event in events:
        if isinstance(event, int):
            expected = model.data(event)
            assert node.handle(now, 1, data(event, step=step)) == expected, events
        elif event == "post" and exchange is None:
            exchange = node.post(now, "grad", step, 0, deadline=deadline)
            model.post(now)
        elif event == "end":
            payload = b"" if must is None else packet.end(must)
            node.handle(now, 1, encode(END, payload, source=1, channel=CHANNEL, index=3, step=step))
            model.end(now, must or ())
        elif event in TIMES:
            now += TIMES[event]
            node.timers(now)
            model.passes(now)
        if exchange is not None:
            assert (exchange.over_at is not None) == model.over, events
            assert set(np.nonzero(exchange.arrived[1])[0]) == model.arrived, events
            for unit in range(3):
                expected = unit if unit in model.arrived else 0xEE
                assert (exchange.pieces[1, unit * UNIT : (unit + 1) * UNIT] == expected).all(), events
    if exchange is not None:
        node.released(("grad", step, 0))
    return now


TIMES = {"nearly": MS - 1, "a little": 1, "long": 3 * MS}


@pytest.mark.parametrize("deadline", [0, 2 * MS])
def test_completion_is_the_models_in_every_order(deadline):
    """Units, END, duplicates, late and early ones, posting and time: all sequences of five, each a step of a bucket."""
    now = SECOND
    node = Node(0, 2, {"grad": [(3 * UNIT, UNIT)]}, reorder=MS)
    for step, events in enumerate(itertools.product([0, 1, "end", "post", "nearly", "a little"], repeat=5), start=1):
        if "post" in events:
            now = follow(node, step, deadline, events, now)
            node.produce_all(now)
    node.close()


@given(
    events=st.lists(st.sampled_from([0, 1, 2, 2, "end", "post", "post", *TIMES]), max_size=20),
    deadline=st.sampled_from([0, 2 * MS]),
    must=st.none() | st.sets(st.integers(0, 2)).map(sorted),
)
@settings(max_examples=150, deadline=None)
def test_completion_is_the_models_in_long_orders(events, deadline, must):
    node = Node(0, 2, {"grad": [(3 * UNIT, UNIT)]}, reorder=MS, reported=() if must is None else ("grad",))
    follow(node, 1, deadline, events, SECOND, must)
    node.close()


# ---- Rate ----


def test_a_fixed_rate_is_what_was_said():
    lib, out = load(), (ctypes.c_double * 5)()
    for ceiling in (1e6, 1e10):
        rate, datagrams = lib.ml_rate_new(4e6, ceiling, RULES["fixed"], 1000, 1.0), 0
        for number, share in enumerate((1, 0, 0.5), start=1):
            now, datagrams = SECOND + number * MS, datagrams + int(300 * share)
            lib.ml_rate_sample(rate, now, 41 * MS)
            lib.ml_rate_report(rate, now, datagrams, datagrams * 1000, 300 * number, now // 1000, 0, 0.0)
            lib.ml_rate_get(rate, out)
            assert out[0] == ceiling
        lib.ml_rate_free(rate)


# ---- Exchanges between several ----


def exchange_all(world, phase, step, bucket):
    """Post and send on all nodes; the exchanges, and what each node sent."""
    shard = world.nodes[0].buckets[phase][bucket][0]
    sent = [pieces(node.rank, node.size, shard, step) for node in world.nodes]
    world.kept = getattr(world, "kept", []) + sent
    exchanges = [node.post(world.now, phase, step, bucket) for node in world.nodes]
    for node in world.nodes:
        node.lib.ml_release(node.send(phase, step, bucket, sent[node.rank]))
    return exchanges, sent


def check(world, phase, bucket, exchanges, sent):
    """Check that the received data are those sent, and nothing else was written."""
    shard, unit = world.nodes[0].buckets[phase][bucket]
    for node, exchange in zip(world.nodes, exchanges):
        assert exchange.arrived[node.rank].all()
        for source in range(node.size):
            if source == node.rank:
                continue
            whole = np.repeat(exchange.arrived[source], unit)[:shard]
            expected = np.where(whole, sent[source][node.rank], 0xEE)
            assert (exchange.pieces[source, :shard] == expected).all()
            assert (exchange.pieces[source, shard:] == 0xEE).all()


@given(seed=st.integers(0, 2**32), loss=st.sampled_from([0.05, 0.3, 0.6]))
@settings(max_examples=25, deadline=None)
def test_what_is_lost_is_what_the_network_lost(seed, loss):
    """Units lost, doubled and delayed at random, control datagrams too: all ends, and says exactly what arrived."""
    generator = random.Random(seed)
    arrived = set()
    copies = [0]

    def link(source, destination, datagram, now):
        kind, fields = fields_of(datagram)
        times = [] if generator.random() < loss else [now + generator.randrange(5 * MS)]
        times += [now + generator.randrange(5 * MS)] if generator.random() < 0.05 else []
        if kind == DATA and times:
            copies[0] += len(times)
            key = (fields["phase"], fields["step"], fields["bucket"], source, destination, fields["index"])
            arrived.add((key, min(times)))
        return times

    with World(3, BUCKETS, link, reorder=6 * MS) as world:
        for step in range(3):
            keys = [("grad", step, 0), ("grad", step, 1), ("param", step, 0)]
            begun = {key: exchange_all(world, *key) for key in keys}
            world.run(lambda: all(x.over_at for xs, _ in begun.values() for x in xs))  # noqa: B023
            for (phase, _, bucket), (exchanges, sent) in begun.items():
                check(world, phase, bucket, exchanges, sent)
                for node, exchange in zip(world.nodes, exchanges):
                    for source in {0, 1, 2} - {node.rank}:
                        units = {
                            key[-1]
                            for key, _ in arrived
                            if key[:5] == (packet.PHASES.index(phase), step, bucket, source, node.rank)
                        }
                        assert set(np.nonzero(exchange.arrived[source])[0]) == units
        world.run_for(20 * SECOND)
        for node in world.nodes:  # every rank has the end of all others
            assert node.lib.ml_linger(node.channel, 0) == 0


@pytest.mark.parametrize(
    ("count", "units", "window"),
    [(1000, 20, 32), pytest.param(10_000, 72, 256, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_nothing_stalls_when_datagrams_are_lost(count, units, window):
    """At 10 % loss of everything: no exchange takes five times the median."""
    generator = random.Random(7)
    link = lambda source, destination, datagram, now: [] if generator.random() < 0.1 else [now + 2 * MS]
    times = []
    with World(2, {"grad": [(units * UNIT, UNIT)]}, link, window=window) as world:
        for step in range(count):
            begun = world.now
            exchanges, _ = exchange_all(world, "grad", step, 0)
            world.run(lambda: all(x.over_at for x in exchanges))  # noqa: B023
            times.append(world.now - begun)
            for node in world.nodes:
                node.released(("grad", step, 0))
            world.kept = world.kept[-2:]
    assert max(times) <= 5 * np.median(times), (max(times) / MS, np.median(times) / MS)


def test_a_late_rank_loses_nothing():
    """More than may be sent before it is there: the rest waits."""
    with World(2, {"grad": [(200 * UNIT, UNIT)] * 3}, eager=20 * UNIT, packet=UNIT) as world:
        first, second = world.nodes
        sent = [pieces(0, 2, 200 * UNIT, bucket) for bucket in range(3)]
        for bucket in range(3):
            first.send("grad", 0, bucket, sent[bucket])
        world.run_for(10 * SECOND)
        assert second.counters(0)["early"] == 20  # of all buckets together
        exchanges = [second.post(world.now, "grad", 0, bucket) for bucket in range(3)]
        posted_at = world.now
        world.run(lambda: all(x.over_at for x in exchanges), SECOND)
        assert world.now - posted_at < 30 * MS
        for bucket, exchange in enumerate(exchanges):
            assert exchange.arrived.all() and (exchange.pieces[0, : 200 * UNIT] == sent[bucket][1]).all()
        assert second.counters(0)["early_dropped"] == 0


def test_a_stopped_rank_finds_a_short_queue():
    """Ten seconds of SIGSTOP while exchanges are outstanding: what waits in its socket stays within a small buffer."""
    with World(2, {"grad": [(4000 * UNIT, UNIT)] * 2}, window=64, eager=1 << 20) as world:
        begun = [exchange_all(world, "grad", 0, bucket) for bucket in range(2)]
        world.run_for(3 * MS)
        world.stopped.add(1)
        waiting = []
        deliver, world.nodes[1].handle = world.nodes[1].handle, lambda now, *what: waiting.append(what)
        world.run_for(10 * SECOND)
        assert len(waiting) < 64 + 300
        world.stopped.clear()
        world.nodes[1].handle = deliver
        for what in waiting:
            deliver(world.now, *what)
        resumed = world.now
        world.run(lambda: all(x.over_at for xs, _ in begun for x in xs), 2 * SECOND)
        assert world.now - resumed < 500 * MS
        for bucket, (exchanges, sent) in enumerate(begun):
            check(world, "grad", bucket, exchanges, sent)
            assert all(exchange.arrived.all() for exchange in exchanges)


def test_the_deadline_ends_an_exchange_and_its_sender_stops():
    link = lambda source, destination, datagram, now: [now + MS]
    with World(2, {"grad": [(1000 * UNIT, UNIT)]}, link, rate=1e6) as world:
        exchange = world.nodes[1].post(world.now, "grad", 0, 0, deadline=20 * MS)
        begun = world.now
        sent = pieces(0, 2, 1000 * UNIT)
        handle = world.nodes[0].send("grad", 0, 0, sent)
        world.run(lambda: exchange.over_at, SECOND)
        assert 20 * MS <= exchange.over_at - begun < 21 * MS
        came = exchange.arrived[0].sum()
        assert 50 < came < 500 and exchange.arrived[0, :came].all()
        world.run_for(5 * MS)
        assert world.nodes[0].lib.ml_wait(handle, 1, 0) == 0
        counters = world.nodes[1].counters(0)
        assert counters["lost"] == 1000 - came
        assert (exchange.arrived[0].sum(), counters["late"] > 0) == (came, True)


# ---- Memory, steps, death ----


def test_early_datagrams_take_no_more_memory_than_is_allowed(pair):
    """A forger may begin as many exchanges as it likes."""
    node = Node(0, 2, {"grad": [(10 * UNIT, UNIT)] * 1000}, memory=100_000)
    for bucket in range(1000):
        for unit in range(10):
            node.handle(SECOND, 1, data(unit, bytes(UNIT), bucket=bucket, step=bucket % 7))
    counters = node.engine_counters()
    assert 90_000 < counters["early_bytes"] <= 100_000
    assert node.counters(1)["early_dropped"] > 5000
    exchange = node.post(SECOND, "grad", 0, 0)
    assert exchange.arrived[1].all()
    for bucket in range(1, 1000):
        node.post(SECOND, "grad", 20, bucket)  # what is older is forgotten
    assert node.engine_counters()["early_bytes"] == 0
    node.close()


def test_steps_far_ahead_are_dropped_and_steps_that_are_over_are_late(pair):
    pair.post(SECOND, "grad", 100, 0)
    assert pair.handle(SECOND, 1, data(0, step=100)) == "taken"
    assert pair.handle(SECOND, 1, data(0, step=101, number=1)) == "early"
    assert pair.handle(SECOND, 1, data(0, step=109, number=2)) == "early dropped"
    assert pair.handle(SECOND, 1, data(0, step=99, number=3)) == "late"
    with pytest.raises(AssertionError, match="-2"):
        pair.post(SECOND, "grad", 100, 0)


def test_steps_wrap(pair):
    pair.post(SECOND, "grad", 2**32 - 1, 0)
    assert pair.handle(SECOND, 1, data(0, step=0)) == "early"
    exchange = pair.post(SECOND, "grad", 0, 0)
    assert exchange.arrived[1].sum() == 1


def test_a_rank_of_which_nothing_is_heard_fails_the_channel():
    with World(3, BUCKETS, peer_timeout=3 * SECOND) as world:
        exchange_all(world, "grad", 0, 0)
        world.run_for(100 * MS)
        world.stopped.add(2)
        waiting = world.nodes[0].post(world.now, "grad", 1, 0)
        world.run(lambda: all(node.failed()[0] for node in world.nodes[:2]), 5 * SECOND)
        assert [node.failed() for node in world.nodes[:2]] == [(1, 2), (1, 2)]
        assert world.nodes[0].lib.ml_wait(waiting.handle, 0, 0) == -1


def test_a_rank_that_only_says_that_it_is_alive_is_waited_for():
    with World(2, BUCKETS, peer_timeout=3 * SECOND) as world:
        exchange = world.nodes[0].post(world.now, "grad", 0, 0)
        world.run_for(60 * SECOND)
        assert exchange.over_at is None and world.nodes[0].failed() == (0, 0)


def test_a_rank_that_closes_is_gone_for_those_who_wait():
    with World(2, BUCKETS) as world:
        exchange = world.nodes[0].post(world.now, "grad", 0, 0)
        world.run_for(5 * MS)
        world.nodes[1].lib.ml_close(world.nodes[1].channel, world.now)
        world.run(lambda: world.nodes[0].failed()[0], SECOND)
        assert world.nodes[0].failed() == (3, 1) and exchange.over_at is None
        assert world.nodes[0].lib.ml_linger(world.nodes[0].channel, 0) == 0
        world.nodes[1].lib.ml_free(world.nodes[1].engine)
        world.nodes[1].engine = None


def test_a_rank_that_closes_after_its_end_is_not_lost():
    """No more comes than it sent; the reorder window of the waiting rank goes on."""
    link = lambda source, destination, datagram, now: [] if source == 1 and b"lost" in datagram else [now + MS]
    with World(2, {"grad": [(4 * UNIT, UNIT)]}, link, reorder=100 * MS) as world:
        sent = [np.zeros((2, 4 * UNIT), np.uint8) for _ in range(2)]
        sent[1][0, UNIT : UNIT + 4] = list(b"lost")
        exchanges = [node.post(world.now, "grad", 0, 0) for node in world.nodes]
        for node in world.nodes:
            node.lib.ml_release(node.send("grad", 0, 0, sent[node.rank]))
        world.run(lambda: exchanges[1].over_at)
        world.run_for(5 * MS)
        world.nodes[1].lib.ml_close(world.nodes[1].channel, world.now)
        world.run(lambda: exchanges[0].over_at, SECOND)
        assert world.nodes[0].failed() == (0, 0)
        assert exchanges[0].arrived[1].tolist() == [True, False, True, True]
        world.nodes[1].lib.ml_free(world.nodes[1].engine)
        world.nodes[1].engine = None


def test_what_callers_have_freed_is_not_read():
    """Their bitmap may be something else by the time that a late unit comes, while others have not acknowledged ours."""
    late = []

    def link(source, destination, datagram, now):
        kind, fields = fields_of(datagram)
        if source == 1 and kind == packet.DATA and fields["index"] == 1:
            late.append(datagram)
            return []
        return [] if source == 1 and kind == packet.READY else [now + MS]

    with World(2, {"grad": [(4 * UNIT, UNIT)]}, link) as world:
        exchanges, _ = exchange_all(world, "grad", 0, 0)
        world.run(lambda: exchanges[0].over_at)
        assert exchanges[0].arrived[1].tolist() == [True, False, True, True]
        world.nodes[0].released(("grad", 0, 0))
        exchanges[0].arrived[:] = True
        assert world.nodes[0].handle(world.now, 1, late[0]) == "late"
