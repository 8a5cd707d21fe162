"""Codes over UDP: with drawn losses what pieces give, bit for bit; what the network lost, replayed; tags of datagrams."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup
from megatron_lossy.transport.ends import end_for
from tests.ranks import each, run_ranks
from tests.rules import assert_same
from tests.test_hooks import OVERLAPS
from tests.test_transport import exchange_grads, gather_params
from tests.test_udp import assert_replayed
from tests.test_virtual import real_runs, trained
from tests.tiny_gpt import TinyGPT
from tests.udp_packet import CODES, DATA, END, encode
from tests.udp_world import CHANNEL, MS, SECOND, Node

pytestmark = pytest.mark.shows(
    "codes over UDP: drawn losses give what pieces give", "codes that the network lost are replayed bit for bit"
)

CODED = {"loss_unit": "packet", "packet_bytes": 40, "wire_block": 32, "grad_wire": "int8", "param_wire": "int8"}
LOSSY = {"p_grad": 0.45, "p_param": 0.45}
INT4 = {"grad_wire": "int4", "grad_recovery": "previous"}


@pytest.mark.parametrize("size", [2, 3])
def test_the_public_collectives_give_what_pieces_give(size, pool):
    shards = [2500, 50]
    configs = [
        LossyConfig(**CODED | LOSSY | {"transport": "udp"} | flags)
        for flags in (
            {},
            {"udp_key_file": "none", "param_wire": "raw", **INT4},
            {"grad_wire": "raw", "grad_recovery": "zero"},
            {"lossy_links": "inter-node:1" if size == 2 else "inter-node:2"},
        )
    ]
    alone = {"udp_key_file": None, "transport": "pieces"}
    pieces = [dataclasses.replace(config, **alone) for config in configs]
    for exchange in (exchange_grads, gather_params):
        mine, theirs = (
            pool.run(each, size, exchange, [(size, config, shards, True) for config in both])
            for both in (configs, pieces)
        )
        assert_same(mine, theirs)


def cases(**flags):
    config = LossyConfig(**CODED | LOSSY | {"packet_bytes": 264, "wire_block": 64, "transport": "udp"} | flags)
    for dtype, overlap, more in (
        ("fp32", "both", {}),
        ("bf16", "both", INT4),
        ("bf16", "none", {"param_send": "compensated:0.6", "grad_recovery": "renormalize-remote"}),
    ):
        yield (
            f"{dtype} {overlap}",
            {"dtype": dtype, "accumulation": 2, "layers": 1, **OVERLAPS[overlap]},
            dataclasses.replace(config, **more),
        )


def test_megatron_over_udp_is_megatron_in_pieces(pool):
    assert_same(pool.run(real_runs, 3, list(cases())), pool.run(real_runs, 3, list(cases(transport="pieces"))))


@pytest.mark.parametrize("rule", ["renormalize", pytest.param("previous", marks=pytest.mark.slow)])
def test_what_was_lost_is_replayed_bit_for_bit(rule, tmp_path, pool):
    tiny, steps = TinyGPT(dtype="bf16", **OVERLAPS["both"]), 5
    coded = {"packet_bytes": 264, "wire_block": 64, "grad_wire": "int8", "param_wire": "int8", "grad_recovery": rule}
    config = LossyConfig(transport="udp", udp_deadline="0.3", delivery_log=str(tmp_path / "log"), **coded)
    first = pool.run(trained, 2, tiny, config, steps)
    assert_replayed(pool, tmp_path / "log", tiny, first, **coded)


def bytes_of_sockets(rank, config):
    engine = end_for(config)
    before = engine.counters()["bytes_sent"]  # of other tests in this process
    exchange_grads(rank, 2, config, [50_000], False)
    gather_params(rank, 2, config, [50_000], False)
    return engine.counters()["bytes_sent"] - before


def test_datagrams_are_fewer(pool):
    sent = [
        max(pool.run(bytes_of_sockets, 2, LossyConfig(transport="udp", grad_wire=grad, param_wire=param)))
        for grad, param in (("raw", "raw"), ("int8", "int8"), ("int4", "int8"))
    ]
    assert sent[0] / sent[1] == pytest.approx(3.9, rel=0.05) and sent[0] / sent[2] == pytest.approx(5.2, rel=0.05)


def other_codes(rank, configs):
    with pytest.raises(UsageError) as error:
        LossyGroup.create(configs[rank], [BucketSpec(1280)])
    return str(error.value)


def test_ranks_with_other_codes_do_not_meet():
    configs = [LossyConfig(transport="udp", grad_wire=wire) for wire in ("int8", "int4")]
    for message in run_ranks(other_codes, 2, configs):
        assert message.startswith(
            "--grad-wire, --param-wire, --sync-dtype: form of values of dense-e0-s0-c0-0 is grad: int8"
        )
        assert message.endswith("on rank 0 and grad: int4 param: raw on rank 1")
    blocks = [LossyConfig(transport="udp", grad_wire="int8", wire_block=block) for block in (64, 128)]
    for message in run_ranks(other_codes, 2, blocks):
        assert "digest of buckets, dtypes and ranks" in message


@settings(deadline=None, max_examples=200)
@given(
    code=st.sampled_from(sorted(CODES.values())),
    tag=st.integers(0, 255),
    size=st.integers(0, 40),
    unit=st.integers(0, 3),
    kind=st.sampled_from([DATA, END]),
)
def test_another_code_or_length_is_malformed(code, tag, size, unit, kind):
    """Counted and dropped; three units of 34 bytes, and one of 10."""
    buckets = {"grad": [(112, 34)]}
    node = Node(0, 2, buckets)
    try:
        node.lib.ml_bucket(node.channel, 0, 0, *buckets["grad"][0], code, False)
        node.post(SECOND, "grad", 0, 0)
        said = encode(kind, bytes(size), source=1, channel=CHANNEL, index=unit if kind == DATA else 4, tag=tag)
        verdict = node.handle(SECOND + MS, 1, said)
        right = size == (10 if unit == 3 else 34) if kind == DATA else size == 0
        wanted = code if kind == DATA else 0
        assert (verdict == "taken") == (right and tag >> 3 == wanted), (verdict, tag)
        assert verdict in ("taken", "malformed")
    finally:
        node.close()
