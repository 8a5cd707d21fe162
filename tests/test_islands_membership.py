"""Islands that hear answers at different times: they agree on epochs, whoever starts, dies, freezes and comes back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.mechanisms.islands.elastic import membership as module
from megatron_lossy.mechanisms.islands.elastic.membership import Membership
from megatron_lossy.mechanisms.islands.elastic.standing import Pace, Standing
from megatron_lossy.mechanisms.islands.epochs import Epoch, Incarnation

pytestmark = pytest.mark.shows("islands that are launches of their own agree on who is there", device=False)

TIMEOUT, JOIN, KEEP = 5.0, 20.0, 2


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


class Lighthouse:
    """What torchft's does: all that are alive and have asked hear the same."""

    def __init__(self, clock, islands):
        self.clock, self.islands = clock, islands
        self.running: dict[int, Membership] = {}
        self.steps: dict[int, int] = {}
        self._lives = itertools.count(1)

    def start(self, slot, step=-1, digest="d", what=None, role="send", host=None, address=None):
        one = Membership(
            slot, self.islands, digest, what or {}, TIMEOUT, host or f"host{slot}",
            (address or f"10.0.0.{slot}", 1000 + slot),
            Incarnation(next(self._lives)), KEEP,
        )  # fmt: skip
        one.begin(step, JOIN, role)
        self.running[slot], self.steps[slot] = one, step
        return one

    def answer(self, hears=None):
        """Everybody has asked; those in ``hears`` hear it."""
        said = [one.tell()[1] for one in self.running.values()]
        for slot, one in self.running.items():
            if hears is None or slot in hears:
                one.hear(said)
        return said

    def apart(self, *groups):
        """A turn in which each of ``groups`` reaches a lighthouse of its own."""
        self.clock.now += 0.5
        self.exchange()
        self.clock.now += 0.5
        said = {slot: one.tell()[1] for slot, one in self.running.items()}
        for group in groups:
            for slot in group:
                self.running[slot].hear([said[other] for other in group])

    def exchange(self):
        """All that are in an epoch make their next exchange; the others are at the same place in the run."""
        begun = [slot for slot, one in self.running.items() if one.latest >= 0]
        if not begun:
            return
        step = max(self.steps[slot] for slot in begun) + 1
        for slot in begun:
            self.steps[slot] = step
            self.running[slot].note(step, self.running[slot].role, 0)

    def turn(self, seconds=1.0, hears=None):
        self.clock.now += seconds / 2
        self.exchange()
        self.clock.now += seconds / 2
        self.answer(hears)

    def turns(self, number):
        for _ in range(number):
            self.turn()

    def in_force(self):
        """By slot, the epoch of the next exchange."""
        found = {}
        for slot, one in self.running.items():
            number = one.in_force(self.steps[slot] + 1)
            found[slot] = None if number < 0 else one.placed(number).epoch
        return found

    def agree(self, *slots):
        epochs = self.in_force()
        return (
            len({epochs[slot] for slot in slots}) == 1
            and epochs[slots[0]] is not None
            and epochs[slots[0]].slots == list(slots)
        )


def hear_each_other(*there, also=()):
    """All of ``there`` hear what each of them says, and ``also``."""
    said = [*(one.tell()[1] for one in there), *also]
    for one in there:
        one.hear(said)
    return said


@pytest.fixture
def lighthouse(monkeypatch):
    return Lighthouse(Clock(monkeypatch), 3)


def all_begin(lighthouse):
    for slot in range(3):
        lighthouse.start(slot)
    lighthouse.answer()
    assert lighthouse.agree(0, 1, 2)
    assert all(epoch.first == 0 and epoch.senders == [0, 1, 2] for epoch in lighthouse.in_force().values())


def test_a_run_begins_at_once_when_all_are_there(lighthouse):
    lighthouse.start(0)
    lighthouse.start(1)
    lighthouse.turns(5)
    assert all(one.latest < 0 for one in lighthouse.running.values())
    lighthouse.start(2)
    lighthouse.answer()
    assert lighthouse.agree(0, 1, 2)


def test_a_run_begins_without_those_that_do_not_come(lighthouse):
    lighthouse.start(0)
    lighthouse.start(2)
    lighthouse.turns(int(JOIN) + 2)
    assert lighthouse.agree(0, 2)


def test_who_hears_of_the_beginning_later_begins_with_the_same_epoch(lighthouse):
    for slot in range(3):
        lighthouse.start(slot)
    lighthouse.answer(hears=[1])
    assert lighthouse.running[1].latest == 0 and lighthouse.running[0].latest < 0
    lighthouse.steps[1] = 0
    lighthouse.running[1].note(0, "send", 0)  # it makes the first exchange, and waits for the others
    lighthouse.answer(hears=[0, 1])
    lighthouse.answer()
    firsts = [one.placed(0).epoch for one in lighthouse.running.values()]
    assert len(set(firsts)) == 1 and firsts[0].first == 0 and firsts[0].slots == [0, 1, 2]
    assert all(one.latest == 0 for one in lighthouse.running.values())


def test_who_dies_is_left_out_and_listens_and_then_sends_once_it_is_back(lighthouse):
    all_begin(lighthouse)
    lighthouse.turns(10)
    del lighthouse.running[1]
    lighthouse.turns(12)
    assert lighthouse.agree(0, 2)
    assert all(one.latest == 1 for one in lighthouse.running.values())
    back = lighthouse.start(1)
    lighthouse.turns(15)
    assert lighthouse.agree(0, 1, 2)
    assert lighthouse.in_force()[0].senders == [0, 2]
    back.note(lighthouse.steps[1], "send", 0)
    lighthouse.turns(12)
    assert lighthouse.agree(0, 1, 2) and lighthouse.in_force()[1].senders == [0, 1, 2]


def test_an_epoch_that_broke_begins_anew(lighthouse):
    all_begin(lighthouse)
    lighthouse.turns(10)
    lighthouse.running[2].breaks(lighthouse.running[2].placed(0).epoch)
    lighthouse.turns(12)
    assert lighthouse.agree(0, 1, 2) and lighthouse.in_force()[0].first > 10
    assert all(one.latest == 1 for one in lighthouse.running.values())


def test_after_a_crash_of_all_the_run_goes_on_from_the_latest_checkpoint(lighthouse):
    for slot, step in enumerate((99, 99, 49)):
        lighthouse.start(slot, step)
    lighthouse.answer()
    epoch = lighthouse.in_force()[0]
    assert (epoch.first, epoch.senders, epoch.slots) == (100, [0, 1], [0, 1, 2])


@pytest.mark.parametrize("together", [True, False])
def test_who_was_listening_when_it_saved_goes_on_listening(lighthouse, together):
    """Its checkpoint is recent, and yet not all of its weights are those of the run."""
    for slot in (0, 1):
        lighthouse.start(slot, 99)
    if not together:
        lighthouse.turns(int(JOIN) + 2)
    lighthouse.start(2, lighthouse.steps[0], role="listen")
    lighthouse.answer()
    lighthouse.turns(0 if together else 12)
    assert lighthouse.agree(0, 1, 2) and lighthouse.in_force()[2].senders == [0, 1]


def test_another_flag_is_refused_by_name(lighthouse):
    lighthouse.start(0, what={"--sync-fraction": "0.01"}, digest="a")
    other = lighthouse.start(1, what={"--sync-fraction": "0.05"}, digest="b")
    lighthouse.answer()
    other.note(0, "send", 0)  # a third one may decide
    lighthouse.clock.now += JOIN
    lighthouse.answer()
    with pytest.raises(UsageError, match=r"--sync-fraction 0.05: island 0 \(host0\) has 0.01; all must be alike"):
        other.note(0, "send", 0)


def test_a_flag_is_that_of_most_islands_while_all_wait(lighthouse):
    wrong = lighthouse.start(0, what={"--lr": "0.1"}, digest="a")
    for slot in (1, 2):
        lighthouse.start(slot, what={"--lr": "0.2"}, digest="b")
    lighthouse.answer()
    with pytest.raises(UsageError, match=r"--lr 0.1: island 1 \(host1\) has 0.2; all must be alike"):
        wrong.note(0, "send", 0)
    for slot in (1, 2):
        lighthouse.running[slot].note(0, "send", 0)


@pytest.mark.parametrize("began", [False, True])
def test_an_island_with_other_flags_ends_no_other(lighthouse, began):
    """Neither one that starts for a slot that is alive, nor one that began elsewhere."""
    all_begin(lighthouse)
    own = dict(lighthouse.running)
    wrong = lighthouse.start(0, what={"--lr": "0.1"}, digest="a")
    if began:
        lighthouse.clock.now += JOIN
        wrong.hear([wrong.tell()[1]])  # at another lighthouse
        assert wrong.latest == 0
    hear_each_other(wrong, *own.values())
    for step, one in enumerate(own.values()):
        one.note(step, "send", 0)
        assert one.placed(one.latest).epoch.slots == [0, 1, 2] and one.latest == 0
    if not began:
        wrong.note(0, "send", 0)  # the others might be dead
        lighthouse.clock.now += TIMEOUT + 1
        wrong.hear([wrong.tell()[1], *(one.tell()[1] for one in own.values())])
        with pytest.raises(UsageError, match="--lr 0.1: island 1"):
            wrong.note(0, "send", 0)


def test_a_start_with_other_flags_is_not_refused_by_its_own_past(lighthouse):
    """It ended, and starts again with another flag, while what it was is in one more answer."""
    dead = lighthouse.start(0, digest="a").tell()[1] | {"waits": False}
    again = [lighthouse.start(slot, digest="b") for slot in range(3)]
    hear_each_other(*again, also=[dead])
    assert all(one.latest < 0 for one in again)
    lighthouse.answer()
    assert lighthouse.agree(0, 1, 2)


def test_a_slot_that_is_alive_is_not_taken_over(lighthouse):
    """The later start waits for as long as a dead one could be in answers, and is refused; no other epoch begins."""
    all_begin(lighthouse)
    old = lighthouse.running[1]
    new = lighthouse.start(1)
    for _ in range(int(TIMEOUT) + 2):
        new.note(0, "send", 0)
        lighthouse.clock.now += 1.0
        hear_each_other(*lighthouse.running.values(), old)
    with pytest.raises(UsageError, match="--island 1: host1 has it, and is alive"):
        new.note(0, "send", 0)
    for one in (old, lighthouse.running[0], lighthouse.running[2]):
        one.note(1, "send", 0)
        assert one.latest == 0


def test_of_two_starts_of_a_slot_that_wait_the_earlier_counts(lighthouse):
    """While one of them may be dead none begins."""
    islands = [lighthouse.start(slot) for slot in (0, 1, 2)]
    again = lighthouse.start(1)
    for _ in range(2):
        said = hear_each_other(*islands, again)
        assert all(one.latest < 0 for one in (*islands, again))
        lighthouse.clock.now += TIMEOUT + 1
    again.hear(said)
    with pytest.raises(UsageError, match="--island 1: host1 has it, and is alive"):
        again.note(0, "send", 0)
    hear_each_other(*islands)
    assert {one.placed(0).epoch.members[1].incarnation for one in islands} == {islands[1]._begun}


def test_a_start_that_died_is_in_one_more_answer(lighthouse):
    all_begin(lighthouse)
    dead = lighthouse.running[1].tell()[1]
    new = lighthouse.start(1)
    hear_each_other(*lighthouse.running.values(), also=[dead])
    assert new.latest < 0
    lighthouse.turns(20)
    assert lighthouse.agree(0, 1, 2) and new.latest == 0


def test_an_island_that_was_away_ends_if_a_later_start_has_its_slot(lighthouse):
    all_begin(lighthouse)
    old = lighthouse.running.pop(1)
    lighthouse.turns(12)
    new = lighthouse.start(1)
    lighthouse.turns(12)
    old.hear([one.tell()[1] for one in (*lighthouse.running.values(), old)])
    with pytest.raises(UsageError, match="--island 1: host1 has it, since later than this one"):
        old.note(0, "send", 0)
    new.note(lighthouse.steps[1], "send", 0)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_messages_that_cannot_be_read_end_no_island(data):
    """A message with some of its items replaced, or lacking; or something else."""
    with pytest.MonkeyPatch.context() as patch:
        lighthouse = Lighthouse(Clock(patch), 3)
        for slot in range(3):
            lighthouse.start(slot)
        for _ in range(2):
            wrong = dict(lighthouse.running[0].tell()[1])
            for name in data.draw(st.lists(st.sampled_from(sorted(wrong)), min_size=1, max_size=4)):
                if data.draw(st.booleans()):
                    wrong.pop(name, None)
                else:
                    wrong[name] = data.draw(JUNK)
            junk = [wrong, {"protocol": module.PROTOCOL}, data.draw(JUNK)]
            said = [one.tell()[1] for one in lighthouse.running.values()]
            for one in lighthouse.running.values():
                one.hear([*junk, *said])
                one.hear(said)
        for one in lighthouse.running.values():
            one.note(0, "send", 0)
            assert one.placed(one.latest).epoch.slots == [0, 1, 2]


def test_messages_that_are_skipped_are_counted_once(lighthouse, caplog):
    all_begin(lighthouse)
    said = [one.tell()[1] for one in lighthouse.running.values()]
    for _ in range(3):
        lighthouse.running[0].hear([*said, {"protocol": 5}, {"of": "another program"}])
    assert len(caplog.messages) == 1 and "are skipped, the 1. kind: protocol 5" in caplog.messages[0]


def test_two_lighthouses_are_two_meshes_and_one_again_once_all_reach_one(lighthouse):
    """Each mesh goes on; after that the epoch of all comes as soon as that of a newcomer."""
    all_begin(lighthouse)
    for _ in range(20):
        lighthouse.apart((0, 1), (2,))
    assert lighthouse.agree(0, 1) and lighthouse.agree(2)
    lighthouse.turn()
    [epoch] = {one.placed(one.latest).epoch for one in lighthouse.running.values()}  # known with the next answer
    assert epoch.slots == [0, 1, 2]
    while lighthouse.steps[0] + 1 < epoch.first:
        lighthouse.turn()
    assert lighthouse.agree(0, 1, 2)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_is_missed_all_agree_a_while_after_the_last_event(data):
    """Islands die, come back and miss answers; once that is over they have one epoch."""
    with pytest.MonkeyPatch.context() as patch:
        lighthouse = Lighthouse(Clock(patch), 4)
        for slot in range(4):
            lighthouse.start(slot)
        for _ in range(data.draw(st.integers(0, 40))):
            what = data.draw(st.sampled_from(["turn", "turn", "turn", "die", "come", "break"]))
            slot = data.draw(st.integers(0, 3))
            if what == "die" and len(lighthouse.running) > 1:
                lighthouse.running.pop(slot, None)
            elif what == "come" and slot not in lighthouse.running:
                lighthouse.start(slot)
            elif what == "break" and slot in lighthouse.running and lighthouse.running[slot].latest >= 0:
                one = lighthouse.running[slot]
                one.breaks(one.placed(one.latest).epoch)
            else:
                hears = data.draw(st.sets(st.integers(0, 3)))
                lighthouse.turn(hears=hears)
        if not lighthouse.running:
            lighthouse.start(0)
        lighthouse.turns(60)
        assert lighthouse.agree(*sorted(lighthouse.running))
        roles = {member for epoch in lighthouse.in_force().values() for member in epoch.senders}
        assert roles


@pytest.mark.parametrize("of", [0, 1])
def test_an_address_that_only_its_own_host_knows_is_refused_at_the_start(monkeypatch, of):
    """Both say so: neither can meet the other."""
    lighthouse = Lighthouse(Clock(monkeypatch), 2)
    there = [lighthouse.start(slot, address="127.0.0.1" if slot == of else None) for slot in range(2)]
    lighthouse.answer()
    why = rf"--rendezvous 127.0.0.1: island {of} \(host{of}\) reaches it from its loopback"
    for one in there:
        with pytest.raises(UsageError, match=why):
            one.first(lambda: None, 1.0)


def test_islands_of_one_host_may_meet_on_its_loopback(monkeypatch):
    lighthouse = Lighthouse(Clock(monkeypatch), 2)
    there = [lighthouse.start(slot, host="here", address="127.0.0.1") for slot in range(2)]
    lighthouse.answer()
    assert all(one.first(lambda: None, 1.0).epoch.slots == [0, 1] for one in there)


def test_who_waits_for_others_hears_now_and_then_that_there_is_no_epoch_yet(monkeypatch):
    lighthouse = Lighthouse(Clock(monkeypatch), 2)
    one = lighthouse.start(0)
    lighthouse.answer()
    assert one.first(lambda: None, 0.0) is None


def test_who_is_alone_follows_the_run_and_not_the_other_way_round(monkeypatch):
    clock = Clock(monkeypatch)
    lighthouse = Lighthouse(clock, 3)
    first, second, alone = (lighthouse.start(slot) for slot in range(3))
    for one in (first, second, alone):
        for step in range(3):
            clock.now += 2.0
            one.note(step, "send", 0, None if one is alone else Epoch((), 0))
    alone.note(40, "listen", 0)
    lighthouse.answer()
    assert (first.furthest, alone.furthest) == (2, 2)
    assert (first.ahead(2), alone.ahead(2), alone.ahead(7)) == (0.0, 0.0, 10.0)
    clock.now += 6.0
    assert alone.ahead(7) == 4.0  # the others have gone on
    assert alone.ahead(2) < 0
    clock.now += TIMEOUT
    assert alone.ahead(7) is None
    for one in (first, second):
        one.note(3, "send", 0)
    lighthouse.answer()
    assert first.furthest == 3 and alone.ahead(7) == 8.0  # nobody exchanges


def test_islands_that_train_together_do_not_follow_one_that_is_alone(monkeypatch):
    """Not while their own exchanges fail, nor if an answer lacks one of them; one that was frozen follows the others."""
    clock = Clock(monkeypatch)
    lighthouse = Lighthouse(clock, 3)
    first, second, alone = islands = [lighthouse.start(slot) for slot in range(3)]
    lighthouse.answer()
    together = Epoch(first.placed(0).epoch.members[:2], 10)
    for one in (first, second):
        one.note(543, "send", 0, together)
    alone.note(623, "send", 0)
    lighthouse.answer()
    for one in (first, second):
        one.note(544, "send", 0)
    lighthouse.answer()
    assert (first.furthest, second.furthest, alone.furthest) == (544, 544, 544)
    clock.now += 2.0
    first.hear([one.tell()[1] for one in (first, alone)])
    assert first.furthest == 544
    clock.now += TIMEOUT + 3.0  # for good
    first.hear([one.tell()[1] for one in (first, alone)])
    assert first.furthest == 623
    first.note(545, "send", 0, still=True)  # it was frozen
    first.hear([one.tell()[1] for one in islands])
    assert first.furthest == 623
    second.note(600, "send", 0, Epoch(islands[1].placed(0).epoch.members[1:], 550))
    alone.note(640, "send", 0, Epoch(islands[1].placed(0).epoch.members[1:], 550))
    lighthouse.answer()
    assert first.furthest == 640


def test_an_island_that_has_trained_all_the_time_keeps_its_weights():
    for still in (False, True):
        standing = Standing(0, overlap=1)
        standing.slot.sent, standing.slot.made = 530, 12
        for now in (0.0, 0.4, 5.0, 5.4, 12.0 if still else 9.0):
            standing.begins(now, patience=5.0)
        standing.exchanges(together=True)  # with those that are gone meanwhile
        assert standing.behind(622, 6) is still
        for together in (False, True, True):
            standing.exchanges(together)
            assert standing.stood_still is still
        standing.exchanges(together=True)  # those under way have come back
        assert not standing.stood_still


def test_a_few_that_are_left_behind_in_an_epoch_and_are_ahead_are_not_followed(monkeypatch):
    """They are quicker, being few. They follow the others, if these are ahead."""
    lighthouse = Lighthouse(Clock(monkeypatch), 6)
    islands = [lighthouse.start(slot) for slot in range(6)]
    old, new = Epoch((), 0), Epoch((), 50)
    for step, few in ((100, 120), (140, 130)):
        for one in islands[:2]:
            one.note(few, "send", 0, old)
        for one in islands[2:5]:
            one.note(step, "send", 0, new)
        islands[5].note(90, "listen", 0)  # in no exchange
        lighthouse.answer()
        assert [one.furthest for one in islands[2:]] == [step] * 4
        assert islands[0].furthest == step


def test_of_two_halves_none_follows_the_other(monkeypatch):
    lighthouse = Lighthouse(Clock(monkeypatch), 4)
    islands = [lighthouse.start(slot) for slot in range(4)]
    for one, step, met in zip(islands, (100, 101, 120, 120), (0, 0, 50, 50)):
        one.note(step, "send", 0, Epoch((), met))
    lighthouse.answer()
    assert [one.furthest for one in islands] == [101, 100, 120, 120]


def test_the_pace_of_others_is_that_with_those_they_wait_for_while_they_are_there(monkeypatch):
    clock = Clock(monkeypatch)
    lighthouse = Lighthouse(clock, 3)
    one, other, fresh = (lighthouse.start(slot) for slot in range(3))
    lighthouse.answer()
    assert one.alone and one.pace is None  # nobody trains yet
    one.note(0, "send", 0, pace=0.3)
    other.note(0, "send", 0, pace=0.2)
    fresh.note(0, "send", 0)
    lighthouse.answer()
    assert (one.pace, other.pace, fresh.pace) == (0.2, 0.3, 0.3) and not one.alone
    clock.now += 60.0  # the lighthouse is away: others may be there
    assert fresh.pace == 0.3 and not fresh.alone
    del lighthouse.running[0]
    lighthouse.answer()
    assert fresh.pace == 0.2
    del lighthouse.running[1]
    lighthouse.answer()
    assert fresh.pace is None and fresh.alone


def epoch_with_a_new_one(monkeypatch, exchanges, seconds, pace=None):
    """That of an island that has made so many by itself, and of one that comes. Beside it the seconds that the first one tells."""
    clock = Clock(monkeypatch)
    lighthouse = Lighthouse(clock, 2)
    one = lighthouse.start(0)
    clock.now += JOIN
    lighthouse.answer()
    for step in range(exchanges):
        one.note(step, "send", 0, pace=pace)
        clock.now += seconds
    told = one.tell()[1]["seconds"]
    lighthouse.start(1)
    for _ in range(3):
        lighthouse.answer()
    return one.placed(one.latest).epoch, told


def test_who_is_alone_plans_with_the_pace_that_it_has_with_others(monkeypatch):
    epoch, told = epoch_with_a_new_one(monkeypatch, 100, 0.01, pace=0.3)
    assert told == pytest.approx(0.3 / 1.5)
    assert epoch.first == 100 + 35  # 7 s of 0.2


def test_one_that_has_made_no_two_exchanges_says_nothing_of_seconds(monkeypatch):
    """Else a new island would have a slow run wait for many exchanges, or a quick one for long."""
    epoch, _ = epoch_with_a_new_one(monkeypatch, 4, 60.0)
    assert epoch.slots == [0, 1] and epoch.first == 5  # the next but one: that under way was begun


def test_nobody_waits_for_who_comes_back_until_it_has_the_run_s_iteration(lighthouse):
    all_begin(lighthouse)
    lighthouse.turns(40)
    del lighthouse.running[2], lighthouse.steps[2]
    back = lighthouse.start(2)
    for _ in range(2):  # it hears of the run, and tells that it does not wait any more
        lighthouse.answer()
    assert [one["waits"] for one in lighthouse.answer()] == [False] * 3
    assert lighthouse.running[0].ahead(40) <= 1.0
    back.note(30, "listen", 0)
    lighthouse.answer()
    assert lighthouse.running[0].ahead(40) == 10.0


def test_who_waits_for_nobody_keeps_the_pace_that_it_had_with_others():
    pace, now = Pace(), 100.0
    assert pace.early(now) == 0  # as quickly as it can, before it has met anybody
    for took in (0.3, 0.3, 5.0, 0.3, 0.3):  # one of them had waited for somebody that died
        pace.begins(now, waits=True)
        now += took
    pace.begins(now, waits=False)
    for _ in range(3):  # alone, and quicker
        now += 0.01
        assert pace.early(now) == pytest.approx(0.29)
        now += pace.early(now)
        pace.begins(now, waits=False)
    assert pace.early(now + 20.0) == 0  # it had been frozen
    for ahead, expected in ((None, 0.3), (-1.0, 0.0), (-0.5, 0.15), (0.0, 0.3), (2.0, 1.0)):
        assert pace.wait(now, ahead, 2.0, 1.0) == pytest.approx(expected)
    assert pace.wait(now, 9.0, 2.0, 1.25) == pytest.approx(1.25)


def test_who_has_met_nobody_yet_has_the_pace_of_others():
    pace = Pace()
    pace.begins(100.0, waits=False)
    assert pace.wait(100.01, None, None, 1.0) == 0
    assert pace.wait(100.01, None, 0.3, 1.0) == pytest.approx(0.29)
    assert pace.wait(100.01, 5.0, 0.3, 1.0) == 1.0


@settings(deadline=None)
@given(
    st.lists(st.floats(0.0, 0.4), min_size=2, max_size=2), st.sampled_from([0.05, 0.3]), st.sampled_from([0.01, 0.04])
)
def test_two_that_each_take_the_other_to_be_ahead_do_not_run_away(late, usual, takes):
    """Each hears where the other was after it had asked, by up to a poll; for a minute."""
    little, clock, made, seconds = 1.25, [0.0, 0.0], [0, 0], [usual, usual]
    paces = [Pace(), Pace()]
    for pace, began in zip(paces, clock):
        pace.begins(began - usual, waits=True)
        pace.begins(began, waits=False)
    while min(clock) < 60:
        one = clock.index(min(clock))
        clock[one] += takes
        other = made[1 - one] + late[one] / seconds[1 - one]
        ahead = (made[one] - other) * seconds[1 - one]
        clock[one] += paces[one].wait(clock[one], ahead, None, little)
        paces[one].begins(clock[one], waits=False)
        made[one] += 1
        seconds[one] = clock[one] / made[one]
    slowest = (usual - takes) * (1 - max(late) / little) + takes
    assert max(made) <= 1.2 * 60 / slowest
