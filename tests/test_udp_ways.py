"""Processes with several interfaces, of which one fails: exchanges go on over another, and come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.lab import Lab
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport.udp import process
from tests.test_lab import needs_lab
from tests.test_udp_moved import world
from tests.test_udp_size import exchange
from tests.udp_world import MS, SECOND, SECOND_WAY

pytestmark = pytest.mark.shows("datagrams over several interfaces, of which one fails", device=False)

ROOT = Path(__file__).parents[1]


class Cables:
    """The link of a world of two ranks with two networks; ``cut``: pairs (source, network) that nothing comes through."""

    def __init__(self):
        self.cut = set()
        self.carried = [0, 0]

    def __call__(self, source, destination, datagram, now):
        network = int(destination >= SECOND_WAY)
        if (source, network) in self.cut:
            return []
        self.carried[network] += 1
        return [now + MS]


def switched(network):
    return [node.engine_counters()["switched"] for node in network.nodes]


@pytest.mark.parametrize("cipher", [True, False])
@pytest.mark.parametrize("broken", [{(0, 0), (1, 0)}, {(0, 0)}, {(1, 0)}], ids=["both ways", "one way", "other way"])
def test_an_exchange_goes_on_over_the_other_network_and_back(cipher, broken):
    cables = Cables()
    with world(cables, cipher=cipher, ways=True) as network:
        assert exchange(network, 0).all() and cables.carried[1] == 0
        cables.cut = broken
        began = network.now
        exchange(network, 1)
        assert network.now - began < SECOND
        assert exchange(network, 2).all() and exchange(network, 3).all()
        assert 1 <= max(switched(network)) <= 2 and cables.carried[1] > 40
        cables.cut = set()
        network.run_for(12 * SECOND)
        cables.carried = [0, 0]
        before = switched(network)
        assert exchange(network, 4).all() and cables.carried[1] == 0 and switched(network) == before


def test_the_first_network_is_not_taken_again_before_it_carries_both_ways():
    cables = Cables()
    with world(cables, ways=True) as network:
        exchange(network, 0)
        cables.cut = {(0, 0), (1, 0)}
        exchange(network, 1)
        cables.cut = {(1, 0)}
        before = switched(network)
        for step in range(2, 40):
            network.run_for(SECOND)
            assert exchange(network, step).all()
        assert switched(network) == before


def test_when_nothing_comes_over_any_network_all_are_tried_and_it_goes_on_with_the_first_that_carries():
    cables = Cables()
    with world(cables, ways=True) as network:
        exchange(network, 0)
        cables.cut = {(rank, number) for rank in range(2) for number in range(2)}
        exchange(network, 1, deadline=5 * SECOND)
        assert min(switched(network)) >= 5
        cables.cut = {(0, 0), (1, 0)}
        exchange(network, 2, deadline=2 * SECOND)
        assert exchange(network, 3).all()


def test_who_has_one_interface_is_not_switched():
    cables = Cables()
    with world(cables) as network:
        exchange(network, 0)
        cables.cut = {(0, 0), (1, 0)}
        exchange(network, 1, deadline=5 * SECOND)
        cables.cut = set()
        assert switched(network) == [0, 0] and exchange(network, 2).all()


def test_a_stranger_without_a_cipher_is_none_of_the_addresses():
    with world(cipher=False, ways=True) as network:
        exchange(network, 0)
        network.addresses[1] = 100
        assert not exchange(network, 1, deadline=100 * MS)[0].any()
        assert network.nodes[0].engine_counters()["moved"] == 0


@pytest.mark.parametrize("names", ["a,", "a,a", "a,b,c,d,e", ""])
def test_interfaces_that_cannot_be(names):
    with pytest.raises(
        UsageError, match=r"--udp-interface .*must be the name of an interface, or 2 to 4 different ones"
    ):
        LossyConfig(transport="udp", udp_interface=names)


def test_sockets_take_the_interfaces_in_turns(monkeypatch):
    monkeypatch.setattr(
        process, "find_addresses", lambda names, master: [f"127.0.0.{k + 1}" for k in range(len(names))]
    )
    try:
        for threads, found in ((1, [["1", "2"], ["2", "1"]]), (3, [["1", "2"], ["2", "1"], ["1", "2"]])):
            config = LossyConfig(transport="udp", udp_interface="a,b", udp_threads=threads, udp_rate="8gbit")
            engines = process.engines_for(config)
            assert [[one[-1] for one in (engine.address, *engine.others)] for engine in engines] == found
            assert all(engine.rate == 1e9 / len(engines) for engine in engines)
    finally:
        process.close_engines()


@pytest.mark.slow
@needs_lab
@pytest.mark.parametrize("cipher", ["aes-128-gcm", "none"])
def test_a_cable_is_pulled_and_put_back(cipher):
    """Every exchange ends, few lose anything, and both cables are in use again: before that the ranks do not end."""
    with Lab(None) as lab:
        first, second = lab.nodes
        first.ip(f"link add lab1 type veth peer name lab1 netns {second.do(threading.get_native_id)}")
        for node in lab.nodes:
            node.ip("link set lab1 up", f"addr add 10.78.0.{node.number + 1}/24 dev lab1")
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": "lab0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": first.address,
            "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        ranks = [
            node.start(
                [sys.executable, "-m", "tests.udp_two_cables", cipher],
                cwd=ROOT,
                env=environment | {"RANK": str(node.number)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for node in lab.nodes
        ]

        def wait_for(exchanges):
            for _ in range(exchanges):
                assert ranks[0].stdout.readline()

        wait_for(5)
        for cable in ("lab1", "lab0"):
            wait_for(30)
            second.ip(f"link set {cable} down")
            wait_for(80)
            second.ip(f"link set {cable} up")
        ranks[0].stdin.write("both are up\n")
        outputs = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), outputs
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    for one in found:
        assert one["incomplete"] <= 0.1 * one["exchanges"]
        assert one["last"] == 0
    assert sum(one["switched"] for one in found) >= 2  # once a cable; the other end may follow before it is silent
