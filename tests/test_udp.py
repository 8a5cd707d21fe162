"""``--transport udp`` under Megatron and without it: with drawn losses it is ``pieces``, bit for bit."""

import dataclasses

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from tests import contract
from tests.ranks import run_ranks
from tests.test_hooks import BOTH, OVERLAPS, RULES, SETTINGS, contract_holds
from tests.test_transport import STEPS, exchange_grads, gather_params
from tests.test_virtual import real_runs
from tests.tiny_gpt import TinyGPT

UDP = dataclasses.replace(BOTH, transport="udp")


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("cipher", ["aes-128-gcm", "none"])
def test_the_public_collectives_give_what_pieces_give(size, cipher):
    shards = [50, 7]
    for rule in RULES:
        config = LossyConfig(
            p_grad=0.45, p_param=0.45, transport="udp", packet_bytes=48, udp_cipher=cipher, grad_recovery=rule
        )
        pieces = LossyConfig(
            p_grad=0.45, p_param=0.45, transport="pieces", loss_unit="packet", packet_bytes=48, grad_recovery=rule
        )
        for exchange in (exchange_grads, gather_params) if rule == "renormalize" else (exchange_grads,):
            mine = run_ranks(exchange, size, size, config, shards, rule != "zero")
            theirs = run_ranks(exchange, size, size, pieces, shards, True)
            for rank in range(size):
                for step in range(STEPS):
                    for bucket in range(len(shards)):
                        np.testing.assert_array_equal(mine[rank][step][bucket], theirs[rank][step][bucket])


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_of_megatron(name):
    world, tiny = SETTINGS[name]
    _, lost = contract_holds(tiny, world=world, config=UDP)
    assert bool(lost["grad"]) == bool(lost["param"]) == (world > 1)


@pytest.mark.parametrize("name", ["compensated", *RULES])
def test_every_rule_and_overlap_gives_what_pieces_give(name):
    flags = {"param_send": "compensated", "param_lag": "0.6"} if name == "compensated" else {"grad_recovery": name}
    chosen = [
        (
            f"{dtype} {overlap}",
            {"dtype": dtype, "accumulation": 2, **OVERLAPS[overlap]},
            dataclasses.replace(UDP, **flags),
        )
        for dtype in ("fp32", "bf16")
        for overlap in OVERLAPS
    ]
    pieces = [(key, tiny, dataclasses.replace(config, transport="pieces")) for key, tiny, config in chosen]
    for mine, theirs in zip(run_ranks(real_runs, 3, chosen), run_ranks(real_runs, 3, pieces), strict=True):
        for key, *_ in chosen:
            for (loss, norm, replica, owned), expected in zip(mine[key], theirs[key], strict=True):
                assert (loss, norm) == expected[:2]
                for place in replica:
                    np.testing.assert_array_equal(replica[place], expected[2][place], f"{key} {place}")
                    np.testing.assert_array_equal(owned[place], expected[3][place], f"{key} {place}")


def test_without_loss_between_two_ranks_it_is_megatron():
    tiny = TinyGPT(dtype="bf16", accumulation=2, **OVERLAPS["both"])
    mine = run_ranks(contract.plain, 2, tiny, LossyConfig(transport="udp"), 4)
    theirs = run_ranks(contract.plain, 2, tiny, LossyConfig(), 4)
    for (weights, reports), (expected, expected_reports) in zip(mine, theirs, strict=True):
        assert reports == expected_reports
        for key, value in expected.items():
            np.testing.assert_array_equal(weights[key], value, err_msg=key)
