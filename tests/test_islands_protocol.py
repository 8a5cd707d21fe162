"""The rules of one list of epochs, in virtual time with the code that islands run."""

import itertools
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_lossy.mechanisms.islands.membership import messages
from megatron_lossy.mechanisms.islands.membership.messages import Beat, Birth, Entry, Preparation, Slot, read, write
from megatron_lossy.mechanisms.islands.membership.protocol import Island, Local, Plan
from tests.islands_simulated import CHANCES, TIMES, World

pytestmark = pytest.mark.shows("one list of epochs holds through kills, freezes, cuts, a lost store", device=False)


RULES = ["the question to a holder", "the quiet of a new store", "connections of every pair", "the larger branch"]


def after_trouble(seed, without=""):
    """Five islands in trouble for 25 minutes, and some time later in one epoch."""
    found = World(seed, without=without)
    found.run(1500)
    found.trouble = False
    found.run(1300)
    found.check_one_epoch()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_missed_in_the_simulation(rule, monkeypatch):
    if rule == "connections of every pair":
        monkeypatch.setattr(messages, "connected", lambda wanted, ready, keep: wanted)
    if rule == "the larger branch":
        monkeypatch.setattr(messages, "weight", lambda branch, live, ident: (True, 1, ident))
    broken, seed = [], 0
    while not broken:  # as many runs as it takes
        found = after_trouble(seed, without=rule)
        broken, seed = found.broken, seed + 1


def world(size=3, seed=0):
    """Islands in one epoch, and nothing that happens by itself."""
    found = World(seed, size, trouble=False)
    found.run(60)
    found.check_one_epoch()
    assert not found.broken
    return found


def epoch(found):
    return read(Entry, found.store.values["epoch"])


def slots(members):
    return [int(one.partition("/")[0]) for one in members]


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 40))])
def test_the_rules_hold_in_trouble_at_random(seed):
    found = after_trouble(seed)
    assert found.broken == []
    assert found.counts["entries"] > 5 and found.counts["met"] > 100_000


@pytest.mark.parametrize("same", [range(0), range(8)], ids=["elsewhere", "on the same machine"])
def test_kills_that_follow_each_other_quickly_do_not_end_the_run(same):
    found = world(8)
    found.same = same
    for _ in range(40):
        dies = found.random.choice([one for one in found.processes if one.held and one.alive])
        found.kill(dies)
        found.back[dies.slot] = found.now + 8
        found.run(11)
        assert len([one for one in found.processes if one.alive and one.sends()]) >= 1 + bool(same)
    found.run(120)
    found.check_one_epoch()
    assert found.broken == [] and found.counts["entries"] > 30
    assert [entry.number for entry in found.entries.values() if not entry.parent] == [min(found.entries)]


EVENTS = st.lists(
    st.tuples(st.sampled_from(sorted(CHANCES)), st.permutations(range(4)), st.floats(0, 1), st.floats(0, 60)),
    max_size=12,
)


def any_order(events):
    found = World(1, 4, trouble=False)
    found.run(30)
    for kind, (one, other, *_), extent, pause in events:
        found.happen(kind, one, other, extent)
        found.run(pause)
    found.run(1300)
    found.check_one_epoch()
    assert found.broken == []


#: One of a pair that has just become the run is cut off from the store, and the one that was left out has received it lately.
CUT_OFF = [
    ("cut", [0, 1, 2, 3], 0.62, 51.9),
    ("outage", [0, 3, 1, 2], 0.54, 39.2),
    ("one way", [2, 0, 3, 1], 0.35, 8.13),
    ("unlink", [0, 3, 2, 1], 0.29, 50.7),
    ("kill", [1, 0, 3, 2], 0.9, 37.7),
    ("cut", [2, 0, 3, 1], 0.0, 0.0),
    ("start", [0, 2, 1, 3], 0.85, 6.6),
]


@settings(max_examples=5, deadline=None, derandomize=True)
@example(CUT_OFF)
@given(EVENTS)
def test_the_rules_hold_in_any_order_of_events(events):
    any_order(events)


@pytest.mark.nightly
@settings(max_examples=300, deadline=None)
@given(EVENTS)
def test_the_rules_hold_in_many_orders_of_events(events):
    any_order(events)


def test_all_begin_at_once_when_the_last_one_is_there():
    found = World(0, 3, trouble=False)
    found.run(TIMES.quiet + 10)
    first = epoch(found)
    assert slots(first.members) == slots(first.senders) == [0, 1, 2] and (first.first, first.parent) == (0, "")


def test_an_empty_slot_is_waited_for_no_longer_than_the_flag_says():
    found = World(0, 3, trouble=False)
    found.kill(found.processes[1])
    found.back[1] = 100.0
    found.run(TIMES.quiet + 20)
    assert slots(epoch(found).members) == [0, 2]
    found.run(200)
    assert slots(epoch(found).senders) == [0, 1, 2]


def test_a_start_with_other_flags_or_for_a_taken_slot_is_refused_and_changes_nothing():
    found = world()
    before = dict(found.store.values)
    other, taken = found.start(1, "other"), Island(Slot("1/00000001", "host", "a", "f"), 3, TIMES, 0.0)
    found.run(5)
    assert other.ended.startswith("--island 1: island ") and other.ended.endswith(" has other flags")
    plans = []
    for now in range(3):
        found.run(1)
        plans.append(taken.poll(now, found.store.values, Local(0.0)))
    assert plans[0].ask and plans[-1].refused == "--island 1: the island at host1 has this slot, and is alive"
    assert not any(plan.writes for plan in plans) and epoch(found) == read(Entry, before["epoch"])
    assert {key: value for key, value in found.store.values.items() if "beat" not in key} == {
        key: value for key, value in before.items() if "beat" not in key
    }
    assert all(one.alive for one in found.processes)


def test_a_process_that_has_ended_on_this_machine_need_not_be_silent_first():
    found = world()
    ended = found.processes[1]
    found.kill(ended)
    found.back[1] = 1e9
    taken = Island(Slot("1/00000001", "host", "a", "f"), 3, TIMES, 0.0)
    assert taken.poll(0.0, found.store.values, Local(0.0)).ask.me == ended.me
    assert not taken.poll(1.0, found.store.values, Local(0.0, answers=False)).writes
    assert not taken.poll(2.0, found.store.values, Local(0.0, answers=False, gone="1/ffffffff")).writes
    [claim] = taken.poll(3.0, found.store.values, Local(0.0, answers=False, gone=ended.me)).writes
    assert claim.key == "slot/1" and read(Slot, claim.old).me == ended.me


def test_flags_are_the_next_ones_once_nobody_alive_has_them():
    found = world()
    for process in found.processes:
        found.kill(process)
        found.back[process.slot] = 1e9
    other = found.start(1, "other")
    found.run(TIMES.quiet + 10)
    assert other.island.holds and found.store.values["flags"] == "other" and not found.broken


def test_a_member_that_most_do_not_reach_is_left_out_named_and_tried_again():
    found = world(4)
    for slot in (0, 1):
        found.down[frozenset((slot, 3))] = found.now + 400
    found.kill(found.processes[3])
    found.back[3] = found.now + 15
    found.run(60)
    assert slots(epoch(found).members) == [0, 1, 2]
    met = found.counts["met"]
    found.run(100)
    assert slots(epoch(found).members) == [0, 1, 2]
    assert found.counts["met"] - met >= 6 * 100 / 0.25 * 0.99  # all of the time
    lines = found.processes[0].lines
    assert lines[0].startswith("island 3 at host3 is left out, and tried again in 30 s: ")
    assert "tried again in 60 s" in lines[1]
    found.run(700)
    found.check_one_epoch()
    assert not found.broken


def test_a_store_that_has_lost_all_is_filled_again_and_no_number_repeats():
    found = world()
    before, values = epoch(found), dict(found.store.values)
    found.store.values = {}
    found.run(5)
    assert epoch(found) == before and not found.broken
    assert {key for key in values if key != "prepare"} == found.store.values.keys()
    assert found.store.values["birth"] != values["birth"]
    found.kill(found.processes[2])
    found.run(100)
    assert epoch(found).number > UNIX_LATER and not found.broken
    found.check_one_epoch()


UNIX_LATER = 1_700_000_060


def test_without_a_store_all_goes_on():
    found = world()
    found.away, found.away_until, found.wipe = True, found.now + 300, False
    met = found.counts["met"]
    found.run(290)
    assert found.counts["met"] - met == 6 * 290 / 0.25
    found.run(60)
    found.check_one_epoch()
    assert not found.broken and found.counts["entries"] == 1  # an outage is nobody's silence


def test_two_who_train_together_do_not_follow_one_that_is_alone_and_ahead():
    found = world()
    for slot in (0, 1):
        found.down[frozenset((slot, 2))] = found.now + 200
    found.processes[2].cut_until = found.now + 200
    found.run(150)
    found.processes[2].made += 500
    found.run(150)
    found.check_one_epoch()
    assert not found.broken and found.processes[0].made < found.now + 10


def test_who_comes_copies_and_sends_once_it_has():
    found = world()
    found.kill(found.processes[0])
    found.back[0] = found.now + 5
    entries = []
    while len(entries) < 2 or slots(entries[-1].senders) != [0, 1, 2]:
        found.run(1)
        if not entries or entries[-1] != epoch(found):
            entries.append(epoch(found))
    assert [slots(entry.senders) for entry in entries][-2:] == [[1, 2], [0, 1, 2]]
    assert [slots(entry.members) for entry in entries][-2:] == [[0, 1, 2]] * 2
    for parent, entry in itertools.pairwise(entries):
        assert entry.parent == parent.ident and entry.number == parent.number + 1


def test_less_than_half_of_the_senders_wait_for_the_others_before_they_go_on():
    found = world(4)
    before = epoch(found)
    for slot in (1, 2, 3):
        found.kill(found.processes[slot])
        found.back[slot] = 1e9
    found.run(TIMES.silent + TIMES.alone - 10)
    assert epoch(found) == before
    found.run(40)
    assert slots(epoch(found).members) == [0] and not found.broken


def test_values_that_are_no_messages_are_skipped_and_end_nobody():
    found = world()
    before = epoch(found)
    for key in list(found.store.values):
        if not key.startswith("slot/"):
            found.store.values[key] = '{"protocol": 5}'
    found.store.values |= {"beat/9": "[" * 5000, "slot/9": "null", "other": "1", "beat/x": "\udcff"}
    picture = messages.Picture(found.store.values)
    assert picture.skipped == 9 and picture.entry is None
    found.run(5)
    assert epoch(found) == before and not found.broken
    found.kill(found.processes[1])
    found.run(100)
    found.check_one_epoch()


@pytest.mark.parametrize("count", [10_000, pytest.param(1_000_000, marks=pytest.mark.nightly)])
def test_mutated_values_end_nobody(count):
    """Each poll of an island that holds its slot has a few values that were changed."""
    found, rng = world(), random.Random(2)
    texts, island = found.store.values, found.processes[0].island
    # A preparation for the next number, so that proposals are made.
    members = tuple(one.me for one in found.processes)
    texts["prepare"] = write(Preparation(epoch(found).number + 1, members[0], "00000000", members[:2]))
    now, polls, plan = found.processes[0].clock(), 0, Plan()
    while polls < count:
        values = dict(texts)
        for key in rng.sample(sorted(values), 3):
            # Another holder of its slot ends it, rightly. With a new birth it keeps quiet for a while.
            if key == "slot/0" or (key == "birth" and rng.random() < 0.99):
                continue
            value = bytearray(values[key].encode())
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(value))
                value[at : at + rng.choice([1, 1, 4])] = rng.choice([b"", rng.randbytes(1), b"9", b"-", b"[", b"null"])
                value = value or bytearray(b" ")
            values[key] = value.decode("utf-8", "surrogateescape")
        polls += 1
        now += rng.choice([0.1, 1, 5])
        more = {"received": members[1:], "attempt": plan.attempt, "connected": members}
        plan = island.poll(now, values, Local(1.7e9, polls, polls, ready=True, **more))
        assert plan.lost is None and plan.refused is None


def test_messages_are_what_they_were_and_small():
    member = "63/0123abcd"
    beat = Beat(member, 1 << 20, "sends", 1 << 20, 1 << 18, "0" * 16, 1.2345, 100, messages.Slots.of([member]), "0" * 8)
    assert len(write(beat)) <= 300 and read(Beat, write(beat)) == beat
    entry = Entry(1, ("1/00000001", member), (member,), 2, 3, "", "n")
    assert read(Entry, write(entry)) == entry and read(Entry, write(entry)).ident == entry.ident
    newer = json.loads(write(entry)) | {"more": [1]}
    assert read(Entry, json.dumps(newer)) == entry
    for field, value in (("members", [member]), ("senders", []), ("first", -1), ("first", True), ("number", 1 << 60)):
        newer = json.loads(write(Entry(1, ("1/00000001",), ("1/00000001",), 2, 3, "", "n"))) | {field: value}
        assert read(Entry, json.dumps(newer)) is None
    assert read(Entry, write(Birth("n", 1))) is None and read(Entry, None) is None
