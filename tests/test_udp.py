"""``--transport udp`` and ``stream`` under Megatron and without it: with drawn losses they are ``pieces``, bit for bit."""

import dataclasses

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from tests import contract
from tests.ranks import run_ranks
from tests.rules import assert_same
from tests.test_hooks import BOTH, FEW_SETTINGS, OVERLAPS, RULES, SETTINGS, contract_holds
from tests.test_transport import exchange_grads, gather_params
from tests.test_virtual import assert_virtual_is_real, real_runs, trained
from tests.tiny_gpt import TinyGPT

pytestmark = pytest.mark.shows(
    "over UDP drawn losses give what pieces give, in every setting",
    "over TCP drawn losses give what pieces give",
    "what the network lost is replayed bit for bit",
)

#: The networks; no exchange of a test takes as long as this deadline.
NETWORKS = {"udp": {"transport": "udp"}, "stream": {"transport": "stream", "udp_deadline": "60000"}}
over_networks = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)


@over_networks
@pytest.mark.parametrize(
    ("size", "flags"), [(2, {}), (3, {"udp_key_file": "none"}), pytest.param(5, {}, marks=pytest.mark.slow)]
)
def test_the_public_collectives_give_what_pieces_give(size, network, flags, pool):
    shards = [50, 7]
    for rule in RULES if size == 3 else RULES[:1]:
        lossy = {"p_grad": 0.45, "p_param": 0.45, "packet_bytes": 48, "loss_unit": "packet", "grad_recovery": rule}
        config = LossyConfig(**lossy, **network, **flags)
        pieces = LossyConfig(transport="pieces", **lossy)
        for exchange in (exchange_grads, gather_params) if rule == "renormalize" else (exchange_grads,):
            mine = pool.run(exchange, size, size, config, shards, rule != "zero")
            theirs = pool.run(exchange, size, size, pieces, shards, True)
            assert_same(mine, theirs)


@over_networks
@pytest.mark.parametrize("name", FEW_SETTINGS)
@pytest.mark.slow
def test_every_setting_of_megatron(name, network, pool):
    world, tiny = SETTINGS[name]
    config = dataclasses.replace(BOTH, **network)
    contract_holds(tiny, world=world, config=config, pool=pool, loses=world > 1)


@pytest.mark.on_cuda
@pytest.mark.shows("UDP and TCP: every rule and overlap as pieces")
@pytest.mark.parametrize("name", ["compensated", *(pytest.param(rule, marks=pytest.mark.slow) for rule in RULES)])
@over_networks
def test_every_rule_and_overlap_gives_what_pieces_give(name, network, pool):
    flags = {"param_send": "compensated:0.6"} if name == "compensated" else {"grad_recovery": name}
    chosen = [
        (
            f"{dtype} {overlap}",
            {"dtype": dtype, "accumulation": 2, **OVERLAPS[overlap]},
            dataclasses.replace(BOTH, **network, **flags),
        )
        for dtype, overlap in (("fp32", "both"), ("bf16", "both"), ("bf16", "none"))
    ]
    pieces = [(key, tiny, dataclasses.replace(BOTH, transport="pieces", **flags)) for key, tiny, _ in chosen]
    assert_same(pool.run(real_runs, 3, chosen), pool.run(real_runs, 3, pieces))


@pytest.mark.on_cuda
@pytest.mark.shows("UDP and TCP: every rule and overlap as pieces")
@over_networks
def test_without_loss_between_two_ranks_it_is_megatron(network, pool, unhooked):
    tiny = TinyGPT(dtype="bf16", accumulation=2, **OVERLAPS["both"])
    mine = pool.run(contract.plain, 2, tiny, LossyConfig(**network), 4)
    theirs = unhooked.run(contract.plain, 2, tiny, None, 4)
    assert_same(mine, theirs)


#: Exchanges end before all has arrived, whatever the network does: some of it is really lost.
HURRIED = LossyConfig(transport="udp", packet_bytes=256, udp_deadline="0.3")
HURRIED_STREAM = LossyConfig(transport="stream", packet_bytes=256, udp_deadline="0.3")


def assert_replayed(pool, folder, tiny, first, **flags):
    """``first``, in which the network lost units of both phases, is replayed by ranks that exchange pieces and by virtual workers."""
    lost = {"grad": 0, "param": 0}
    for file in DeliveryLogFolder(folder).files:
        for group in range(len(file.groups)):
            rows = file.read(group)
            for phase in lost:
                lost[phase] += int(rows.lost[rows.phase == phase].sum())
    assert lost["grad"] and lost["param"], lost
    config = LossyConfig(transport="pieces", loss_model=("trace",), trace=str(folder), loss_unit="packet", **flags)
    assert_same(pool.run(trained, 2, tiny, config, len(first[0])), first)
    [virtual] = pool.run(trained, 1, tiny, config, len(first[0]), 2)
    assert_virtual_is_real(virtual, first)


@pytest.mark.parametrize(
    ("overlap", "rule", "hurried"),
    [
        ("both", "renormalize", HURRIED),
        ("both", "renormalize", HURRIED_STREAM),
        pytest.param("none", "previous", HURRIED, marks=pytest.mark.slow),
    ],
)
def test_what_was_lost_is_replayed_bit_for_bit(overlap, rule, hurried, tmp_path, pool):
    tiny, steps = TinyGPT(dtype="bf16", **OVERLAPS[overlap]), 5
    config = dataclasses.replace(hurried, grad_recovery=rule, delivery_log=str(tmp_path / "log"))
    first = pool.run(trained, 2, tiny, config, steps)
    assert_replayed(pool, tmp_path / "log", tiny, first, packet_bytes=256, grad_recovery=rule)


def lost_of_each_source(rank, config):
    lost = np.zeros(4, dtype=int)
    with contract.made(TinyGPT(bucket_size=3000), config) as (run, lossy):
        for step in range(6):
            run.step(step)
            for group in lossy.groups:
                for phase in ("grad", "param"):
                    lost += (~group.delivery(phase, step).arrived[0]).sum(axis=1)
    return lost


def test_within_a_node_nothing_crosses_as_a_datagram():
    config = dataclasses.replace(HURRIED, lossy_links="inter-node:2")
    lost = np.array(run_ranks(lost_of_each_source, 4, config))
    near = np.kron(np.eye(2), np.ones((2, 2))).astype(bool)
    assert (lost[near] == 0).all() and lost[~near].sum() > 0
