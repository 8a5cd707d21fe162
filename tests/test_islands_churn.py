"""Islands that come and go: epochs, who is there, schedules, the mean among those present, and training."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from megatron_lossy.lab.delivery_log.verify import verify
from megatron_lossy.lab.virtual.island_churn import ChurningIslands, Presence
from megatron_lossy.lab.virtual.island_mean import InMemory
from megatron_lossy.lab.virtual.island_schedule import Event, check_schedule, read_schedule
from megatron_lossy.mechanisms.islands.monitor import EPOCHS, EpochLog
from megatron_lossy.mechanisms.islands.rounds import Epoch, Member, Standing, needed_visits, outer_visits
from megatron_lossy.mechanisms.islands.rules import Result, make_rule
from scripts.spells import share_away, spells
from tests.churning_rows import ChurningRows, speed_of_mean
from tests.ranks import run_ranks
from tests.reference import mean_among
from tests.test_islands_train import SMALL, flat, islands_of, losses_of, train_all
from tests.trainer import train_runs, weights_of
from tests.vectors import STREAM, rounds_of

pytestmark = pytest.mark.shows("islands that come and go: epochs, means, returns, replayed, continued")


def write(path, *events):
    """A schedule of (at, slot, event) in the file ``path``."""
    path.write_text("".join(json.dumps({"slot": slot, "at": at, "event": what}) + "\n" for at, slot, what in events))
    return str(path)


def flags(path, **given):
    return LossyConfig(**{"islands": 4, "sync_method": "parameters", "island_schedule": path, **given})


def noise(seed, scale=1.0):
    def act(step, weights, training):
        random = torch.Generator().manual_seed(1000 * seed + step)
        weights[training] += scale * torch.randn(weights.shape, generator=random)[training]

    return act


def start(islands=4, size=60, seed=0):
    return torch.randn(islands, size, generator=torch.Generator().manual_seed(seed))


def still(step, weights, training):
    """An iteration that changes nothing."""


def test_an_id_is_that_of_members_alone():
    one = Epoch((Member(0, 5, "send"), Member(2, 7, "send")), 3)
    assert len(one.id) == 16 and Epoch(one.members, 90).id == one.id
    for change in ({"slot": 3}, {"life": 8}, {"role": "listen"}):
        assert Epoch((one.members[0], one.members[1]._replace(**change)), 3).id != one.id


def after(presence, iterations, now=0, interval=1):
    """Let ``iterations`` pass, with an exchange after each ``interval``. Return those that are over."""
    for _ in range(iterations):
        now += 1
        presence.trained()
        if now % interval == 0:
            presence.about_to_send(now, lambda slot: 0)
            presence.sent(now)
    return now


@pytest.mark.parametrize(
    ("event", "missed", "rejoin", "how", "anew", "idle"),
    [
        ("freeze", 11, "copy", "keep", False, True),
        ("freeze", 12, "copy", "copy", True, True),
        ("freeze", 12, "listen", "listen", True, True),
        ("stop", 11, "copy", "keep", True, True),
        ("stop", 12, "listen", "listen", True, True),
        ("cut", 100, "copy", "keep", False, False),
    ],
)
def test_who_returns_keeps_copies_or_listens(event, missed, rejoin, how, anew, idle):
    presence = Presence(3, keep=11, rejoin=rejoin, overlap=0)
    now = after(presence, 10)
    presence.leave(1, event)
    assert presence.members == [0, 2] and presence.training == ([0, 1, 2] if event == "cut" else [0, 2])
    before = presence.epoch(0)
    now = after(presence, missed, now)
    one = presence.come(1, now)
    assert (one.how, one.source, one.anew, one.idle) == (how, 2, anew, idle)
    assert presence.senders == ([0, 2] if how == "listen" else [0, 1, 2]) and presence.members == [0, 1, 2]
    assert presence.epoch(0).id != before.id


def test_a_slow_island_has_not_stopped():
    """It makes 60 of 100 iterations, so that it lags by 40; with 40 made it has stopped."""
    for made, stopped in ((60, False), (50, False), (49, True)):
        presence = Presence(2, keep=11, rejoin="copy", overlap=0)
        presence.slots[1].made = made
        assert presence.slots[1].lag(100) == 100 - made and presence.slots[1].stopped(100, 11) == stopped


def test_a_new_island_has_no_weights_of_the_run():
    presence = Presence(3, keep=10**6, rejoin="listen", overlap=0, empty=[1])
    now = after(presence, 5)
    assert presence.members == [0, 2]
    assert presence.come(1, now).how == "listen" and presence.lags(now) == [0, 5, 0]
    presence.about_to_send(now, lambda slot: 1)
    assert presence.senders == [0, 2]  # twice, since it had none
    presence.about_to_send(now, lambda slot: 2)
    assert presence.senders == [0, 1, 2]
    assert [needed_visits(q, own) for q in (0, 1, 2) for own in (True, False)] == [1, 2, 6, 6, 9, 9]


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.5, 0.0), (1.0, 0.0), (0.9, 0.5)])
def test_a_listener_with_outer_weights_waits_until_means_have_set_them(lr, momentum):
    """By its rule itself, towards a mean that stays."""
    config = LossyConfig(islands=2, sync_method="diloco", outer_optimizer=(lr, momentum))
    rule, mean = make_rule(config, [torch.ones(1)], None), torch.zeros(1)
    for _ in range(math.ceil(outer_visits(lr, momentum)) + 2):
        rule.apply(0, mean, Result(mean, mean, None, None, None, 0, 0))
    assert abs(rule.outer.item()) < 0.02
    standing = Standing(config)
    standing.enter(10)
    assert standing.joins(10, config.keep) and not standing.may_send(0) and standing.may_send(99)


@pytest.mark.parametrize("parts", [1, 2])
def test_in_codes_a_listener_waits_until_outer_weights_of_others_have_set_all_of_its_own(parts):
    """Distances have nothing of them: each exchange sets those of one element of 32 of its part."""
    config = LossyConfig(islands=2, sync_method="diloco", sync_dtype="int8", p_sync=1e-9, sync_fraction=1 / parts)
    rule, visits = make_rule(config, [torch.ones(100)], None), torch.zeros(parts, 100)
    crossed = rule.payload(torch.ones(1, 100), None, 0)[0].bool() | True
    for number in range(32 * parts):
        assert visits.min() == 0
        visits[number % parts] += rule.set_by(number, crossed, 100)
    assert (visits == 1).all()
    standing = Standing(config)
    standing.enter(10)
    assert standing.joins(10, config.keep) and not standing.may_send(0) and standing.may_send(1)


def test_the_last_sender_is_followed_by_who_lags_least():
    presence = Presence(3, keep=3, rejoin="listen", overlap=0)
    presence.leave(1, "stop")
    now = after(presence, 10)
    presence.come(1, now)
    presence.leave(2, "stop")
    now = after(presence, 5, now)
    presence.come(2, now)
    assert presence.senders == [0]
    presence.leave(0, "stop")
    presence.about_to_send(now, lambda slot: 0)
    assert presence.senders == [2]


def test_who_has_an_outer_optimizer_always_copies():
    presence = Presence(2, keep=10, rejoin="copy", overlap=0, copies=True)
    presence.leave(1, "cut")
    assert presence.come(1, after(presence, 1)).how == "copy"


def test_a_schedule_is_read(tmp_path):
    path = write(tmp_path / "events", (7, 0, "return"), (2, 0, "stop"), (7, 1, "freeze"), (5, 3, "join"))
    schedule = read_schedule(path, 4, 10)
    assert schedule.at(7) == [Event(7, 1, "freeze"), Event(7, 0, "return")]  # who leaves does so first
    assert schedule.empty == [3] and len(schedule.before(7)) == 2


GOOD = '{"slot": 0, "at": 4, "event": "stop"}'


def changed(**items):
    return json.dumps(json.loads(GOOD) | items)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "has no event; must have lines"),
        ([GOOD, "stop 3"], "line 2: stop 3: must be {"),
        ([GOOD, "", "[1]"], "line 3: [1]: must be {"),
        (['{"slot": 0, "at": 4}'], "line 1: event is missing; must be {"),
        ([changed(why=1)], "line 1: why is unknown; must be {"),
        ([changed(slot=4)], "line 1: slot 4: must be in 0 to 3; --islands 4 has no other"),
        ([changed(slot=True)], "line 1: slot True: must be in 0 to 3"),
        ([changed(at=-1)], "line 1: at -1: must be a whole number of at least 0 and below 10"),
        ([changed(at=10)], "line 1: at 10: must be a whole number of at least 0 and below 10"),
        ([changed(at=1.5)], "line 1: at 1.5: must be a whole number"),
        ([changed(event="die")], "line 1: event die: must be one of stop, freeze, cut, return, join"),
        ([changed(event="return")], "line 1: event return: slot 0 is there; must be one of stop, fr"),
        ([GOOD, changed(at=6)], "line 2: event stop: slot 0 has had stop at 4; must be one of return"),
        ([GOOD, changed(event="return")], "line 2: event return: slot 0 has another event at 4"),
        ([GOOD, changed(at=5, event="join")], "line 2: event join: slot 0 has had stop at 4; must be one of"),
        ([changed(slot=slot) for slot in range(4)], "leaves no island at iteration 4; one must stay"),
    ],
)
def test_a_schedule_that_does_not_fit(tmp_path, lines, why):
    path = tmp_path / "events"
    path.write_text("\n".join(lines))
    with pytest.raises(UsageError) as error:
        read_schedule(str(path), 4, 10)
    assert str(error.value).startswith(f"--island-schedule {path}: {why}")


def test_a_schedule_is_checked_before_a_run(tmp_path):
    with pytest.raises(UsageError, match="at 9: must be a whole number of at least 0 and below 8"):
        check_schedule(flags(write(tmp_path / "events", (9, 0, "stop"))), 8)


def test_a_schedule_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match=f"--island-schedule {tmp_path}/none: cannot be read: No such file"):
        read_schedule(str(tmp_path / "none"), 4, 10)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"sync_method": "none"}, "schedule x: needs --islands and a --sync-method of parameters or diloco"),
        ({"sync_method": "eager-diloco", "sync_delay": 1}, "schedule x: needs --islands and a --sync-method of param"),
        ({"island_keep": -1}, "keep -1: must be at least 0"),
        ({"island_rejoin": "wait"}, "rejoin wait: must be one of copy, listen"),
        ({"sync_method": "diloco", "island_rejoin": "listen"}, "rejoin listen: needs --islands and --sync-method para"),
        ({"sync_method": "diloco", "island_keep": 3}, "keep 3: needs --islands and --sync-method parameters"),
    ],
)
def test_flags_that_do_not_fit(given, line):
    with pytest.raises(UsageError, match=f"^--island-{line}"):
        flags("x", **given)


def test_spells_have_their_share():
    for length in (20, 60):
        shares = [share_away(spells(16, 3000, 0.25, length, "stop", seed), 16, 3000) for seed in range(4)]
        assert np.mean(shares) == pytest.approx(0.25, abs=0.02)


@settings(deadline=None, max_examples=40)
@given(
    st.sets(st.integers(0, 5), min_size=1),
    st.sets(st.integers(0, 5)),
    st.integers(6, 50),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from(["shard", "packet"]),
    st.integers(0, 1000),
)
def test_the_mean_is_of_those_present(senders, others, count, loss, unit, step):
    senders, receivers = sorted(senders), sorted(senders | others)
    config = LossyConfig(
        islands=6, sync_method="parameters", p_sync=loss, **({"loss_unit": unit, "packet_bytes": 16} if loss else {})
    )
    crossing = InMemory(config, STREAM, None)
    crossing.among(senders, receivers)
    sent = torch.from_numpy(np.random.default_rng(step).normal(size=(6, count)).astype(np.float32))
    sent[[slot for slot in range(6) if slot not in receivers]] = torch.nan  # of nobody
    mean = crossing.begin(step, sent).wait()
    told = {one.exchange.phase: one for one in crossing.deliveries}

    def arrives(phase, there):
        def asks(receiver, source, number):
            one = told.get(phase)
            return one is None or one.arrived[there.index(receiver), senders.index(source), number]

        asks.receivers = there
        return asks

    expected = mean_among(
        {slot: sent[slot].numpy() for slot in senders},
        arrives("sync-reduce", senders),
        arrives("sync-gather", receivers),
        4 if loss and unit == "packet" else 10**6,
    )
    for slot in receivers:
        came = np.ones(count, bool) if mean.arrived is None else mean.arrived[slot].numpy()
        assert np.array_equal(came, ~np.isnan(expected[slot]))
        np.testing.assert_allclose(mean.values.numpy()[came], expected[slot][came], atol=1e-6)
        assert loss or came.all()
    if mean.arrived is not None:
        away = [slot for slot in range(6) if slot not in receivers]
        assert not mean.arrived[away].any()
    for phase, there in (("sync-reduce", senders), ("sync-gather", receivers)):
        if phase in told:
            assert list(told[phase].sources) == senders and list(told[phase].receivers) == there
            own = [(there.index(slot), senders.index(slot)) for slot in senders]
            assert all(told[phase].arrived[place].all() for place in own)  # the own part never crosses


def test_owners_of_those_present_keep_what_16_bits_leave_of_a_mean():
    config = LossyConfig(islands=4, sync_method="parameters", sync_dtype="bf16")
    crossing = InMemory(config, STREAM, None)
    crossing.among([0, 3], [0, 1, 3])
    sent = start().bfloat16().float()
    mean = crossing.begin(0, sent).wait()
    exact = sent[[0, 3]].mean(dim=0)
    rests = crossing.rest.state_dict()
    torch.testing.assert_close(mean.values + rests[0] + rests[3], exact, atol=1e-6, rtol=0)
    assert rests.keys() == {0, 3}


RULES = {
    "mixing": {"sync_fraction": 0.25, "sync_delay": 3},
    "ema, lost": {"sync_fraction": 0.25, "sync_delay": 3, "delay_correction": "ema", "p_sync": 0.3},
    "smith": {"sync_fraction": 0.5, "sync_delay": 5, "delay_correction": "smith", "sync_subset": "partition"},
    "bf16": {"sync_dtype": "bf16", "sync_interval": 3},
    "int8": {"sync_dtype": "int8", "wire_block": 32, "sync_fraction": 0.5, "sync_delay": 2},
    "diloco": {"sync_method": "diloco", "sync_interval": 4, "p_sync": 0.2},
    "diloco, int4": {
        "sync_method": "diloco",
        "sync_dtype": "int4",
        "wire_block": 32,
        "p_sync": 0.2,
        "sync_fraction": 0.5,
    },
    "diloco, int8, late": {
        "sync_method": "diloco",
        "sync_dtype": "int8",
        "p_sync": 1e-9,
        "sync_interval": 3,
        "sync_delay": 2,
    },
}


@pytest.mark.parametrize("rule", RULES)
def test_without_events_nothing_is_other(tmp_path, rule):
    path = write(tmp_path / "events", (100, 0, "stop"))
    rows = ChurningRows(flags(path, **RULES[rule]), start())
    config = LossyConfig(**{"islands": 4, "sync_method": "parameters", **RULES[rule]})
    weights = start()
    rounds = rounds_of(config, weights)
    for step in range(40):
        noise(1)(step, weights, [0, 1, 2, 3])
        rounds.after_iteration(step)
        rows.iterate(noise(1))
        assert torch.equal(weights, rows.weights)


@pytest.mark.parametrize("rule", RULES)
def test_who_is_away_neither_gives_nor_takes(tmp_path, rule):
    """Its weights may be anything: those of the others do not change by a bit, and its own stay."""
    path = write(tmp_path / "events", (6, 2, "freeze"))
    found = []
    for shift in (0.0, 50.0):
        rows = ChurningRows(flags(path, **RULES[rule]), start())
        for step in range(30):
            if step == 6:
                rows.weights[2] += shift
                kept = rows.weights[2].clone()
            rows.iterate(noise(1))
        assert torch.equal(rows.weights[2], kept)
        found.append(rows.weights[[0, 1, 3]].clone())
    assert torch.equal(*found)


def test_what_an_island_sent_before_it_died_counts(tmp_path):
    """The mean moves by gain (old - mean)/(P - 1), since it takes no correction itself; who only leaves moves nothing."""
    weights = start()
    path = write(tmp_path / "events", (1, 3, "stop"))
    rows = ChurningRows(flags(path, sync_delay=1, delay_correction="mixing:0.25"), weights.clone())
    rows.iterate(still)  # all send, and the first exchange is under way
    rows.iterate(still)
    moved = rows.weights[:3].mean(dim=0) - weights[:3].mean(dim=0)
    torch.testing.assert_close(moved, 0.25 * (weights[3] - weights.mean(dim=0)) / 3, atol=1e-6, rtol=0)


def test_mixing_leaves_the_mean_of_those_there_alone(tmp_path):
    path = write(tmp_path / "events", (0, 3, "freeze"), (20, 1, "stop"), (24, 3, "return"), (60, 1, "return"))
    rows = ChurningRows(flags(path, sync_fraction=0.25, sync_delay=3, island_keep=1000), start())
    for step in range(80):
        there = rows.churn.presence.members
        if step not in (20, 24, 60, 21, 22):  # members change; what the one sent that stopped is under way
            before = rows.weights[there].double().mean(dim=0)
        rows.iterate(still)
        if step not in (20, 24, 60, 21, 22):
            assert torch.allclose(rows.weights[there].double().mean(dim=0), before, atol=1e-6)


def test_a_listener_is_in_nobodys_mean_and_becomes_it(tmp_path):
    path = write(tmp_path / "events", (2, 3, "join"))
    config = flags(path, sync_fraction=0.25, sync_delay=2, island_rejoin="listen")
    rows = ChurningRows(config, torch.cat([start(3), start(1, seed=9) + 100]))
    sends = None
    for step in range(30):
        rows.iterate(still)
        if sends is None and 3 in rows.churn.presence.senders:
            sends = step
        assert rows.weights[:3].abs().max() < 10 or sends
    # Two cycles of four exchanges, of which the first begins after iteration 2, two iterations of delay, and the next one.
    assert sends == 2 + 7 + 2 + 1
    assert torch.allclose(rows.weights[3], rows.weights[0], atol=1e-4)


def test_a_gap_within_the_delay_breaks_no_exchange(tmp_path):
    """An island that was frozen when nothing was due uses its earlier exchanges; one that stopped does not."""
    for event, used in (("freeze", True), ("stop", False)):
        path = write(tmp_path / "events", (2, 3, event), (4, 3, "return"))
        rows = ChurningRows(flags(path, sync_interval=2, sync_delay=4, delay_correction="mixing:0.2"), start())
        for _ in range(5):
            rows.iterate(still)
        before = rows.weights[3].clone()
        rows.iterate(still)  # 5: what began after 1 is due
        assert torch.equal(rows.weights[3], before) != used


@pytest.mark.parametrize(("away", "length"), [(0.25, 20), (0.5, 60)])
def test_old_weights_hold_the_mean_back(tmp_path, away, length):
    """By the share of iterations that are not made; who copies or listens holds nothing back."""
    steps = 1600
    events = spells(8, steps, away, length, "stop", 1)
    path = write(tmp_path / "events", *((one["at"], one["slot"], one["event"]) for one in events))
    # The speed is that of the second half.
    late = [[min(max(one["at"] - steps // 2, 0), steps // 2), one] for one in events]
    share = share_away([{**one, "at": at} for at, one in late], 8, steps // 2)
    settings = {"islands": 8, "sync_fraction": 0.05, "sync_delay": 10}
    stale = speed_of_mean(flags(path, island_keep=steps, **settings), steps, 160)
    assert stale == pytest.approx(1 - share, abs=0.04)
    assert speed_of_mean(flags(path, **settings), steps, 160) > 0.97


@given(drawn=st.data())
@settings(deadline=None, max_examples=25)
def test_any_schedule_can_be_followed(tmp_path_factory, drawn):
    """Somebody always sends, weights stay finite and within their first hull, and an epoch is recorded for each change."""
    away, length = drawn.draw(st.sampled_from([0.2, 0.5])), drawn.draw(st.integers(1, 12))
    event = drawn.draw(st.sampled_from(["stop", "freeze", "cut"]))
    events = spells(4, 60, away, length, event, drawn.draw(st.integers(0, 1000)))
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_text("\n".join(map(json.dumps, events or [{"slot": 0, "at": 59, "event": "stop"}])))
    given = {
        "sync_interval": drawn.draw(st.integers(1, 3)),
        "sync_delay": drawn.draw(st.integers(0, 6)),
        "sync_fraction": drawn.draw(st.sampled_from([0.2, 1.0])),
        "island_rejoin": drawn.draw(st.sampled_from(["copy", "listen"])),
        "p_sync": drawn.draw(st.sampled_from([0.0, 0.3])),
        "delay_correction": "none",
    }
    rows = ChurningRows(flags(str(path), **given), start())
    low, high = rows.weights.amin(dim=0) - 1e-5, rows.weights.amax(dim=0) + 1e-5
    ids = set()
    for _ in range(60):
        rows.iterate(still)
        epoch = rows.churn.epoch
        ids.add(epoch.id)
        assert epoch.slots == rows.churn.presence.members and rows.churn.presence.members
        if (rows.step - 1) % given["sync_interval"] == 0 and rows.step % given["sync_interval"] == 0:
            assert epoch.senders
        assert (rows.weights >= low).all() and (rows.weights <= high).all()
    assert ids <= {one["id"] for one in rows.records}


def test_epochs_are_logged_and_a_log_is_a_schedule(tmp_path):
    events = [(3, 1, "stop"), (9, 1, "return"), (12, 2, "cut")]
    config = flags(write(tmp_path / "events", *events), island_keep=2, sync_interval=2, island_rejoin="listen")
    rows = ChurningRows(config, start())
    for _ in range(20):
        rows.iterate(still)
    log = EpochLog(str(tmp_path))
    for record in rows.records:
        log.add(record)
    assert [one["t"] for one in rows.records] == [0, 3, 9, 11, 12]
    assert [one["exchange"] for one in rows.records] == [0, 1, 4, 5, 6]
    assert rows.records[2]["returned"] == [{"slot": 1, "how": "listen", "from": 2}]
    assert rows.records[2]["roles"] == ["send", "listen", "send", "send"]
    assert rows.records[2]["lag"][1] == 6 and rows.records[3]["roles"] == ["send"] * 4
    again = read_schedule(str(tmp_path / EPOCHS), 4, 20)
    assert again.events == [Event(*one) for one in events]
    with pytest.raises(UsageError, match="holds the log of a run"):
        EpochLog(str(tmp_path)).add({"t": 0})
    with open(tmp_path / EPOCHS, "a") as file:
        file.write('{"t": 30, "unfin')
    later = EpochLog(str(tmp_path))
    later.restart(11)
    later.add({"t": 11})
    lines = [json.loads(line) for line in (tmp_path / EPOCHS).read_text().splitlines()]
    assert [one["t"] for one in lines] == [0, 3, 9, 11] and lines[3] == {"t": 11}


SYNC = {"islands": 4, "sync_method": "parameters", "sync_fraction": 0.5, "sync_delay": 1}
EVENTS = [(1, 3, "join"), (2, 1, "stop"), (3, 2, "cut"), (4, 2, "return"), (5, 1, "return"), (6, 0, "freeze")]


RESUMED = {
    "copy": SYNC | {"island_keep": 2},
    "listen, ema": SYNC | {"island_keep": 2, "island_rejoin": "listen", "delay_correction": "ema"},
    "smith, lost": SYNC | {"sync_delay": 3, "delay_correction": "smith", "p_sync": 0.3, "loss_unit": "bucket"},
    "diloco": {"islands": 4, "sync_method": "diloco", "sync_interval": 2},
}


@pytest.mark.slow
def test_stopped_and_continued_bit_for_bit(data, tmp_path):
    events = {"island_schedule": write(tmp_path / "events", *EVENTS)}
    cases = {}
    for name, loss in RESUMED.items():
        loss = loss | events
        if "p_sync" in loss:
            cases[f"{name}, whole"] = ({}, loss | {"delivery_log": str(tmp_path / "whole log")})
            loss = loss | {"delivery_log": str(tmp_path / "log")}
        else:
            cases[f"{name}, whole"] = ({}, loss)
        for number, stop in enumerate((2, 4, 6)):
            load = {"load": str(tmp_path / name)} if number else {}
            cases[f"{name}, {stop}"] = (load | {"exit_interval": stop, "save": str(tmp_path / name)}, loss)
        cases[f"{name}, end"] = ({"load": str(tmp_path / name), "save": str(tmp_path / name)}, loss)
    train_all(data, tmp_path, cases)
    for name in RESUMED:
        whole, parts = tmp_path / f"{name}, whole", tmp_path / name
        assert weights_of(whole) == weights_of(parts), name
        assert flat(islands_of(whole)) == flat(islands_of(parts)), name
        assert losses_of(whole)[-1] == losses_of(parts)[-1]
    logs = [(tmp_path / name / EPOCHS).read_text() for name in ("whole log", "log")]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) > 6


def returned(rank, given, loss):
    """Return the state of slot 1 right after its return, against slot 2."""
    seen = {}
    bring_back = ChurningIslands._bring_back

    def look(self, one):
        bring_back(self, one)
        mine, theirs = self._state_of(one.slot), self._state_of(one.source)
        seen["return"] = tuple(one)
        seen["equal"] = {name: flat(mine[name]) == flat(theirs[name]) for name in mine}
        seen["shared"] = [a.data_ptr() == b.data_ptr() for a, b in zip(_tensors(mine), _tensors(theirs), strict=True)]
        rates = [self._optimizers[slot].param_groups[0]["lr"] for slot in (one.slot, one.source)]
        seen["rates"] = rates[0] == rates[1]

    ChurningIslands._bring_back = look
    train_runs(rank, (given, loss))
    return seen


def _tensors(state):
    if torch.is_tensor(state):
        return [state] if state.numel() > 1 else []
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else []
    return [one for part in inner for one in _tensors(part)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "rejoin", "keep"),
    [({}, "copy", 0), ({"bf16": True}, "copy", 0), ({}, "listen", 0), ({"bf16": True}, "copy", 9)],
)
def test_an_island_that_returns_shares_nothing(data, tmp_path, more, rejoin, keep):
    """A copy is all of an island; otherwise weights and moments are its own, and the learning rate is the run's."""
    path = write(tmp_path / "events", (1, 1, "stop"), (5, 1, "return"))
    loss = SYNC | {"island_schedule": path, "island_keep": keep, "island_rejoin": rejoin}
    [seen] = run_ranks(returned, 1, SMALL | data | more | {"save": str(tmp_path / "run")}, loss, timeout=300)
    how = "keep" if keep else rejoin
    assert seen["return"] == (1, how, 2, True, True)
    assert seen["equal"]["scheduler"] and seen["rates"] and seen["shared"] and not any(seen["shared"])
    for name in ("weights", "optimizers"):
        assert seen["equal"][name] == (how == "copy")


@pytest.mark.slow
def test_losses_are_recorded_and_replayed_by_the_log(data, tmp_path):
    """Islands of two workers, which lose gradients and parameters too; away or not, they lose the same again."""
    log = tmp_path / "log"
    lost = {"p_grad": 0.3, "p_param": 0.3, "p_sync": 0.3, "loss_unit": "bucket", "grad_recovery": "previous"}
    loss = SYNC | lost | {"islands": 2, "island_keep": 2}
    events = [(2, 1, "stop"), (5, 1, "return"), (6, 0, "freeze")]
    recorded = loss | {"island_schedule": write(tmp_path / "events", *events), "delivery_log": str(log)}
    given = {"global_batch_size": 4}
    trace = {"p_grad": 0.0, "p_param": 0.0, "p_sync": 0.0, "loss_model": ("trace",), "trace": str(log)}
    again = loss | trace | {"island_schedule": str(log / EPOCHS)}
    train_all(data, tmp_path, {"recorded": (given, recorded), "again": (given, again)})
    assert weights_of(tmp_path / "recorded") == weights_of(tmp_path / "again")
    assert losses_of(tmp_path / "recorded") == losses_of(tmp_path / "again")
    assert flat(islands_of(tmp_path / "recorded")["islands"]) == flat(islands_of(tmp_path / "again")["islands"])
    verdict = verify(DeliveryLogFolder(log))
    assert not verdict.problems and set(verdict.usable.values()) == {(0, 7)}


@pytest.mark.slow
def test_another_past_is_refused(data, tmp_path):
    path = tmp_path / "events"
    write(path, (2, 1, "stop"))
    loss = SYNC | {"island_schedule": str(path)}
    train_all(data, tmp_path, {"run": ({"exit_interval": 4}, loss)})
    write(path, (3, 1, "stop"))
    with pytest.raises(Exception, match="has other events before iteration 4 than the checkpoint's run"):
        train_all(data, tmp_path, {"run": ({"load": str(tmp_path / "run")}, loss)})
