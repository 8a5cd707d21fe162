"""Processes whose address changes: they are followed, once they have answered from there."""

from __future__ import annotations

import time

import pytest

from megatron_lossy.transport.udp import packet
from tests.test_lab import needs_lab
from tests.test_udp_size import exchange
from tests.udp_hosts import flood
from tests.udp_world import CHANNEL, MS, SECOND, World, fields_of

pytestmark = pytest.mark.shows("datagrams: addresses that change", device=False)

SHARD, UNIT = 40 * 64, 64


def world(link=None, **settings):
    return World(2, {"grad": [(SHARD, UNIT)]}, link, **{"cipher": True} | settings)


def moved(network):
    return [node.engine_counters()["moved"] for node in network.nodes]


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_moves_is_followed(who):
    with world() as network:
        assert exchange(network, 0).all() and moved(network) == [0, 0]
        network.addresses[who] = 100
        first = exchange(network, 1)
        assert first[1 - who].all()  # what it sends comes through at once
        assert moved(network) == [int(who == 1), int(who == 0)]
        assert exchange(network, 2).all()
        network.addresses[who] = 101
        exchange(network, 3)
        assert exchange(network, 4).all() and sum(moved(network)) == 2


@pytest.mark.parametrize("who", [0, 1])
def test_who_is_behind_a_translator_is_followed_from_the_beginning(who):
    """Nothing comes where it said that it is; it speaks first."""
    with world() as network:
        network.addresses[who] = 100
        exchange(network, 0)
        assert exchange(network, 1).all() and sum(moved(network)) == 1


def test_it_is_followed_while_it_is_silent_but_for_signs_of_life():
    with world() as network:
        exchange(network, 0)
        network.addresses[1] = 100
        network.run_for(3 * SECOND)
        assert moved(network) == [1, 0]
        assert exchange(network, 1).all()


def test_without_a_cipher_nobody_is_followed():
    with world(cipher=False) as network:
        exchange(network, 0)
        (_, datagram), *_ = [one for one in _next(network) if one[0] == 0]
        assert network.nodes[0].handle(network.now, 100, datagram) == "foreign"
        network.addresses[1] = 100
        assert not exchange(network, 1, deadline=500 * MS)[0].any()
        assert moved(network) == [0, 0]


def _next(network):
    """What rank 1 says next: a sign of life."""
    node = network.nodes[1]
    said = []
    while not said:
        network.now += 100 * MS
        node.timers(network.now)
        said = node.produce_all(network.now)
    return said


def test_who_only_sends_on_what_others_sent_gets_nothing():
    """Somebody on the way is faster than the way itself: the newest datagrams come from its address first."""
    stolen = []

    def link(source, destination, datagram, now):
        kind, _ = fields_of(datagram)
        stolen.append((destination, kind, datagram))
        return [now + MS]

    with world(link) as network:
        exchange(network, 0)
        stolen.clear()
        for step in range(1, 20):
            (_, datagram), *_ = [one for one in _next(network) if one[0] == 0]
            assert network.nodes[0].handle(network.now, 300, datagram) == "taken"
            assert exchange(network, step).all()
        assert moved(network) == [0, 0]
        asked = [one for one in stolen if one[1] == packet.CHALLENGE]
        assert asked and {destination for destination, *_ in asked} == {300}
        assert not [one for one in stolen if one[0] == 300 and one[1] != packet.CHALLENGE]


def test_an_answer_to_nothing_is_not_taken():
    with world() as network:
        exchange(network, 0)
        node = network.nodes[0]
        before = node.counters(1)["bad_tag"]
        for kind in (packet.CHALLENGE, packet.ANSWER):
            forged = packet.encode(
                kind, bytes(packet.NONCE_BYTES + packet.TAG_BYTES), source=1, channel=CHANNEL, number=10**4
            )
            assert node.handle(network.now, 1, forged) == "bad tag"
            assert node.handle(network.now, 100, forged) == "foreign"  # a stranger's, and not held against rank 1
        assert node.counters(1)["bad_tag"] == before + 2 and moved(network) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["shared", "dedicated"])
@needs_lab
def test_a_host_gets_another_address_again_and_again(rule, tmp_path):
    """Its socket is bound to an address that is gone; exchanges go on from the new one, and none fails."""
    changes = 3

    def move(nodes):
        for number in range(changes):
            nodes[1].move(number + 1)
            time.sleep(1.5)

    still, moving = flood(rule, 8, tmp_path, move)
    assert still["exchanges"] == moving["exchanges"] > 100
    assert still["moved"] == changes and still["rebound"] == 0
    assert moving["moved"] == 0 and moving["rebound"] == 1
