"""``--transport pieces``: owners add up pieces in the order of ranks; against NumPy, Megatron and virtual workers."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Delivery, Exchange, Stream, cut
from megatron_lossy.base.registry import GRAD_RECOVERIES
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.facts import Facts
from megatron_lossy.config.refusal import check_refusals
from megatron_lossy.recovery import base
from megatron_lossy.recovery.base import ordered_sum
from tests import contract
from tests.ranks import each, run_ranks
from tests.reference import ReferenceReduce
from tests.rules import assert_same, assert_workers_are_ranks
from tests.rules import gradients as record
from tests.test_hooks import BOTH, FEEDBACK, FEW_SETTINGS, OVERLAPS, RULES, SETTINGS, contract_holds
from tests.test_streams import Graph
from tests.test_transport import UNITS, assert_reduced, exchange_grads, gather_params
from tests.test_virtual import real_runs, virtual_runs
from tests.tiny_gpt import TinyGPT

pytestmark = pytest.mark.shows(
    "`--transport pieces`: by value against NumPy, in every setting of Megatron",
    "4 virtual workers in pieces are 4 ranks, bit for bit",
)

PIECES = dataclasses.replace(BOTH, transport="pieces")


@settings(deadline=None)
@given(
    size=st.integers(1, 5),
    shard=st.integers(1, 12),
    packet=st.integers(1, 6),
    rule=st.sampled_from(RULES),
    averaged=st.booleans(),
    seed=st.integers(0, 100),
)
def test_combine_against_the_reference(size, shard, packet, rule, averaged, seed):
    """Missing pieces have any value, infinities included; steps follow each other, for ``previous``."""
    random = np.random.default_rng(seed)
    [units], count = cut([shard], [4], "packet", 4 * packet)
    reference = ReferenceReduce(rule, size, shard, packet)
    owner = int(random.integers(size))
    recovery = GRAD_RECOVERIES.load(rule)(units, owner)
    for step in range(4):
        grads = random.standard_normal((size, shard)).astype(np.float32)
        arrived = random.random((size, count)) > 0.5
        arrived[owner] = True
        everyone = np.ones((size, size, count), dtype=bool)
        everyone[:, owner] = arrived
        expected = reference(np.repeat(grads[:, None], size, axis=1), everyone)[owner]
        pieces = grads.copy()
        pieces[~np.repeat(arrived, packet, axis=1)[:, :shard]] = np.inf
        delivery = Delivery(Exchange("grad", Stream(), step), range(size), [owner], arrived[None], [units])
        output = torch.empty(shard)
        x = record(step, output=output, averaged=averaged)
        recovery.combine(torch.from_numpy(pieces).view(-1), delivery, None, x)
        recovery.finish_step(step, True)
        np.testing.assert_allclose(output.numpy() / (1 if averaged else size), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("size", [2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_exchanges_against_the_reference(size):
    """Every rule and unit, to the last bit with any number of ranks: nobody else chooses the order of the sum."""
    shards = [50, 7]
    for unit, packet_bytes in UNITS.items():
        config = LossyConfig(
            p_grad=0.45, p_param=0.45, loss_unit=unit, packet_bytes=max(packet_bytes, 2), transport="pieces"
        )
        rules = RULES if unit == "packet" else RULES[:1]
        configs = [dataclasses.replace(config, grad_recovery=rule, lossy_self=rule == "zero") for rule in rules]
        calls = [(size, chosen, shards, chosen.grad_recovery != "previous") for chosen in configs]
        for chosen, *real in zip(configs, *run_ranks(each, size, exchange_grads, calls), strict=True):
            # The reference adds the own part last.
            assert_reduced(chosen, real, size, shards, exact=chosen.grad_recovery != "renormalize-remote")
        plain = dataclasses.replace(config, transport="torch")
        calls = [(size, one, shards, True) for one in (config, plain)]
        for mine, theirs in run_ranks(each, size, gather_params, calls):
            assert_same(mine, theirs)


def needs_torch_2_8():
    try:
        check_refusals(PIECES, Facts(torch=torch.__version__))
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", FEW_SETTINGS)
def test_every_setting_of_megatron(name, pool):
    needs_torch_2_8()
    world, tiny = SETTINGS[name]
    contract_holds(tiny, world=world, config=PIECES, pool=pool, loses=world > 1)


@pytest.mark.parametrize("rule", [*RULES, "error-feedback"])
def test_every_rule_with_several_survivors(rule, pool):
    lossy = FEEDBACK if rule == "error-feedback" else BOTH
    config = dataclasses.replace(lossy, transport="pieces", grad_recovery=rule)
    contract_holds(TinyGPT(**OVERLAPS["both"]), world=3, config=config, pool=pool)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rates", [{}, {"p_grad": 0.0, "p_param": 0.0}], ids=["loss", "no loss"])
def test_between_two_ranks_it_is_the_same_as_torch(rates, dtype, pool):
    """There is one sum of two values."""
    tiny = TinyGPT(dtype=dtype, accumulation=2, **OVERLAPS["both"])
    config = dataclasses.replace(PIECES, **rates)
    mine = pool.run(contract.plain, 2, tiny, config, 4)
    theirs = pool.run(contract.plain, 2, tiny, dataclasses.replace(config, transport="torch"), 4)
    assert_same(mine, theirs)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_four_virtual_workers_are_four_ranks_bit_for_bit(dtype):
    """Without clipping: torch adds up the gradient norm of the ranks in an order of its own."""
    chosen = [
        (
            f"{dtype} {rule}",
            {"dtype": dtype, "layers": 1, "clip_grad": 0.0, **OVERLAPS["both"]},
            dataclasses.replace(PIECES, **flags),
        )
        for rule, flags in (
            *((rule, {"grad_recovery": rule}) for rule in RULES),
            ("feedback", {"grad_recovery": "error-feedback", "grad_priority": "packet-mean"}),
            ("compensated", {"param_send": "compensated"}),
        )
    ]
    real = run_ranks(real_runs, 4, chosen)
    [virtual] = run_ranks(virtual_runs, 1, chosen, 4)
    assert_workers_are_ranks(virtual, real)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_of_a_sum_do_not_grow_with_the_number_of_pieces(dtype):
    """On any device but a CPU: torch runs nothing on ``meta``."""
    counts = []
    for size in (2, 4, 8, 64):
        with Graph() as graph:
            ordered_sum(torch.empty(size, 100, dtype=dtype, device="meta"))
        counts.append(len(graph.nodes))
    assert len(set(counts)) == 1, counts


@settings(deadline=None)
@given(
    size=st.integers(1, 100),
    shard=st.integers(1, 40),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    averaged=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_sum_in_few_kernels_has_the_bits_of_a_loop(size, shard, dtype, averaged, seed):
    pieces = (torch.randn(size, shard, generator=torch.Generator().manual_seed(seed)) * 1000).to(dtype)
    pieces[0, 0] = torch.inf
    assert torch.equal(base._sum_in_few_kernels(pieces, averaged), ordered_sum(pieces, averaged))


@pytest.mark.parametrize("shard", [0, 1, base._IN_CACHE, 2 * base._IN_CACHE + 3])
def test_a_sum_in_parts_has_the_bits_of_the_whole(shard):
    pieces = torch.randn(3, shard, generator=torch.Generator().manual_seed(1)).bfloat16()
    arrived = np.ones((1, 3, 1), dtype=bool)
    delivery = Delivery(Exchange("grad", Stream(), 0), range(3), [0], arrived, cut([shard], [2], "shard", 4096)[0])
    for averaged in (False, True):
        output = torch.full((shard,), torch.nan)
        base.add_up(pieces.flatten(), delivery, record(0, output=output, averaged=averaged))
        assert torch.equal(output, ordered_sum(pieces, averaged))


@pytest.mark.cuda
@pytest.mark.shows("a sum of pieces has the same bits on a device")
def test_a_sum_has_the_same_bits_on_the_device():
    pieces = torch.randn(64, 1 << 16)
    for dtype in (torch.float32, torch.bfloat16):
        for averaged in (False, True):
            mine, device = pieces.to(dtype), pieces.to(dtype).cuda()
            assert torch.equal(ordered_sum(device, averaged).cpu(), ordered_sum(mine, averaged))
