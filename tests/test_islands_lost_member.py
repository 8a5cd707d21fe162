"""Datagrams between islands of which one sends nothing any more: it is waited for once, and the others go on without it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.carrying import Among
from megatron_lossy.mechanisms.islands.datagrams import IslandLink
from megatron_lossy.mechanisms.islands.elastic.membership import Placed
from megatron_lossy.mechanisms.islands.elastic.part import ElasticIslands
from megatron_lossy.mechanisms.islands.epochs import Epoch, Incarnation, Member
from megatron_lossy.transport.settings import settings_of
from megatron_lossy.transport.udp.engine import Engine, PeerLost

pytestmark = pytest.mark.shows("datagrams between islands: one is silent and the others go on", device=False)

PATIENCE = 0.8
ISLANDS, SIZE = 3, 300


@pytest.fixture
def links():
    """The links of three islands in one process, and by island what each was told of others."""
    config = LossyConfig(
        islands=ISLANDS, sync_method="parameters", loss_unit="packet", packet_bytes=102, transport="udp"
    )
    store, told = torch.distributed.HashStore(), [[] for _ in range(ISLANDS)]
    pool = ThreadPoolExecutor(ISLANDS + 1)
    engines = [Engine(settings_of(config), "127.0.0.1") for _ in range(ISLANDS)]

    def make(bears):
        def link(number):
            def loses(place, why, waited, left):
                told[number].append((place, why, waited, left))

            more = {"loses": loses} if bears else {}
            return IslandLink(
                config, "lost", number, ISLANDS, store, SIZE, PATIENCE, engine=engines[number], called=[4, 5, 6], **more
            )

        return list(pool.map(link, range(ISLANDS))), told

    yield make, pool
    pool.shutdown()
    for engine in engines:
        engine.close(linger=0.0)


def exchange(pool, links, numbers, value):
    """By island of ``numbers``, what it got of the pieces [3, 100] that all of them send, and what arrived of each."""

    def one(number):
        pieces = torch.full((ISLANDS, SIZE // ISLANDS), float(value + number))
        received, arrived = links[number].scatter(pieces)
        gathered, came = links[number].gather(received[number])
        return received, arrived.all(axis=1), gathered, came.all(axis=1)

    return dict(zip(numbers, pool.map(one, numbers)))


def nothing_of_1(*arrived):
    for one in arrived:
        np.testing.assert_array_equal(one, [True, False, True])


def waits_in_vain(links):
    """Which of ``links`` waits for which place until its patience is over, from now on."""
    found = []

    def noting(number, lose):
        def noted(place):
            found.append((number, place))
            lose(place)

        return noted

    for number, link in enumerate(links):
        link._channel.lose = noting(number, link._channel.lose)
    return found


def test_it_is_waited_for_once(links):
    make, pool = links
    links, told = make(bears=True)
    for received, arrived, gathered, came in exchange(pool, links, range(3), 10).values():
        assert arrived.all() and came.all()
        for rows in (received, gathered):
            assert rows[:, 0].tolist() == [10, 11, 12]
    in_vain = waits_in_vain(links)
    for step in range(1, 5):
        found = exchange(pool, links, (0, 2), 10 * step)
        for received, arrived, gathered, came in found.values():
            nothing_of_1(arrived, came)
            for rows in (received, gathered):
                assert rows[:, 0].tolist() == [10 * step, 0, 10 * step + 2]
    assert sorted(in_vain) == [(0, 1), (2, 1)]
    for number in (0, 2):
        [(place, why, waited, left)] = told[number]
        assert place == 1 and not left and waited >= PATIENCE
        assert "rank 5 of islands lost" in why and "waited for" in why
    assert not told[1]


def test_without_that_the_exchange_fails(links):
    make, pool = links
    links, _ = make(bears=False)
    with pytest.raises(PeerLost):
        exchange(pool, links, (0, 2), 10)


def test_who_is_known_to_be_lost_is_not_waited_for(links):
    make, pool = links
    links, told = make(bears=True)
    for number in (0, 2):
        links[number].do_without(1)
    in_vain = waits_in_vain(links)
    for _, arrived, _, came in exchange(pool, links, (0, 2), 10).values():
        nothing_of_1(arrived, came)
    assert not in_vain and not any(told)


def test_who_lives_is_not_silent(links):
    """It answers, also while it takes part in no exchange."""
    make, pool = links
    links, _ = make(bears=True)
    found = []
    link = links[0]
    silent = link._channel.silent_ranks
    link._channel.silent_ranks = lambda seconds: found.append(silent(seconds)) or []
    exchange(pool, links, (0, 2), 10)  # waits for 1 in vain
    assert len(found) >= 2 and not any(found)
    assert silent(-1.0) == [1, 2]  # which is said of both that there are


def test_who_waits_for_a_silent_island_is_not_lost_with_it(links):
    """0 waits for 1 and 2, of which 1 is silent, and 2 comes later than the patience: it may have waited for 1, too."""
    make, pool = links
    links, told = make(bears=True)
    for number in (0, 2):
        links[number]._channel.silent_ranks = lambda seconds: [1]
    late = pool.submit(lambda: (time.sleep(1.2 * PATIENCE), exchange(pool, links, (2,), 10))[1])
    [(_, arrived, _, came)] = exchange(pool, links, (0,), 10).values()
    late.result()
    nothing_of_1(arrived, came)
    for number in (0, 2):
        [(place, why, *_)] = told[number]
        assert place == 1 and "waited for" in why


def test_who_closes_the_channel_may_live(links):
    """It has gone on to another epoch, perhaps, where it is waited for."""
    make, pool = links
    links, told = make(bears=True)
    exchange(pool, links, range(3), 10)
    links[1].close()
    for _, arrived, _, _ in exchange(pool, links, (0, 2), 20).values():
        nothing_of_1(arrived)
    for number in (0, 2):
        [(place, why, _, left)] = told[number]
        assert place == 1 and left and "closed the channel" in why


def test_whom_an_island_waits_for():
    """Other senders that it does not do without: not who only listens."""
    roles = {3: "send", 5: "send", 6: "listen"}
    epoch = Epoch(tuple(Member(slot, Incarnation(slot), role) for slot, role in roles.items()), 0)
    one, listens = Among(epoch, 3, []), Among(epoch, 6, [])
    assert one.waits and listens.waits
    one.do_without(5)
    listens.do_without(5)
    assert not one.waits and not one.alone and listens.waits
    one.do_without(6)
    assert one.alone


@pytest.mark.parametrize("left", [False, True])
def test_who_is_lost_is_done_without_in_a_later_epoch_too_and_that_is_told(left):
    """Else both would do without each other there for ever; who has left an epoch by itself may be in the later one."""
    members = tuple(Member(slot, Incarnation(slot), "send") for slot in (3, 5))
    openings = []
    for number in range(2):
        placed = Placed(number, Epoch(members, 10 * number), {}, 1.0, 7.0)
        openings.append(Opened(placed, Among(placed.epoch, 3, [])))
    island = SimpleNamespace(
        _openings=openings, _slot=3, _maimed=-1, _diary=SimpleNamespace(note=lambda *_, **more: None)
    )
    ElasticIslands._does_without(island, openings[0].placed, 5, "silent", 10.0, left)
    assert openings[0].among().alone and openings[1].among().alone == (not left)
    assert island._maimed == (0 if left else 1)


class Opened(NamedTuple):
    """An epoch that is open."""

    placed: Placed
    opened: Among

    def among(self):
        return self.opened

    def do_without(self, slot):
        self.opened.do_without(slot)
