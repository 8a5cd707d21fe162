"""Coded exchanges: virtual workers, ranks and NumPy, to the bit; every rule and overlap; what crosses in bytes."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lossy.base.coding.blocks import BlockCode
from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.channel.draws import coding_keys
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual.in_memory import LossyWorkers
from megatron_lossy.mechanisms.compression.monitor import WireMonitor
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_all_gather, lossy_reduce_scatter
from tests import test_transport_in_memory as in_memory
from tests.ranks import each, run_ranks
from tests.reference import ReferenceReduce, block_payload, block_values, hashed_uniforms, reference_gather
from tests.rules import assert_same, assert_workers_are_ranks
from tests.test_hooks import OVERLAPS
from tests.test_transport import deliveries, gradients
from tests.test_udp_on_a_device import LITTLE, on_a_device
from tests.test_virtual import real_runs, virtual_runs

pytestmark = pytest.mark.shows(
    "coded exchanges: N ranks are N virtual workers, bit for bit", "coded exchanges: NumPy, every rule"
)

RULES = ("renormalize", "renormalize-remote", "zero", "previous", "error-feedback")
#: Packets of one block: 32 elements in 34 or 18 bytes.
CODED = {"loss_unit": "packet", "packet_bytes": 40, "wire_block": 32, "grad_wire": "int8", "param_wire": "int8"}
LOSSY = {"p_grad": 0.4, "p_param": 0.4}
FEEDBACK = {"grad_recovery": "error-feedback", "grad_priority": "packet-mean:0.2"}
SHARDS = (70, 7)


def decoded(x, bits, elements, u=None, block=32):
    """Return the values that others get of ``x`` float32[shard], in units of ``elements``."""
    parts = []
    for first in range(0, len(x), elements):
        unit = x[first : first + elements]
        payload = block_payload(unit, bits, block, None if u is None else u[first : first + elements])
        parts.append(block_values(payload, len(unit), bits, block))
    return np.concatenate(parts)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rule", RULES)
def test_gradients_against_the_reference(rule, bits):
    """Every worker's rounded pieces into a reference without codes; the losses that it keeps are not rounded."""
    size, steps = 3, 4
    config = LossyConfig(
        **CODED | {"p_grad": 0.45, "grad_wire": f"int{bits}", "grad_recovery": rule, "grad_priority": "none"}
    )
    lossy, elements = LossyWorkers(config, [BucketSpec(shard) for shard in SHARDS], size), 64 if bits == 4 else 32
    raw = [ReferenceReduce(rule, size, shard, elements) for shard in SHARDS]
    for step in range(steps):
        exchange, arrived = Exchange("grad", Stream(), step), coded_deliveries(config, size, step, elements)
        for bucket, shard in enumerate(SHARDS):
            grads = np.array([gradients(step, rank, size, shard) for rank in range(size)]).reshape(size, size, shard)
            sent = grads + raw[bucket].residual if rule == "error-feedback" else grads
            crossing = sent.copy()
            for source in range(size):
                keys = coding_keys(config.loss_seed, exchange, source, range(size)).view(np.uint32)
                for owner in set(range(size)) - {source}:
                    u = hashed_uniforms([int(word) for word in keys[owner]], 256 * bucket, shard)
                    crossing[source, owner] = decoded(sent[source, owner], bits, elements, u)
            outputs = [torch.empty(shard) for _ in range(size)]
            inputs = [torch.from_numpy(mine.copy()).view(-1) for mine in grads]
            lossy.reduce_scatter(bucket, outputs, inputs, step)
            got = np.array([output.numpy() / size for output in outputs])
            if rule == "error-feedback":
                residual = np.where(expand(arrived[bucket], elements, shard), 0, sent).astype(np.float32)
                raw[bucket].residual[:] = 0
                expected = raw[bucket](crossing, arrived[bucket])
                raw[bucket].residual = residual
            else:
                expected = raw[bucket](crossing, arrived[bucket])
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
        lossy.finish_step(step, True)


def expand(arrived, elements, shard):
    return np.repeat(arrived, elements, axis=2)[:, :, :shard]


def coded_deliveries(config, size, step, elements):
    # Four bytes an element: so many elements as a packet of codes has.
    return deliveries(dataclasses.replace(config, packet_bytes=4 * elements, grad_wire="raw", param_wire="raw"),
                      "grad", size, SHARDS, step)  # fmt: skip


def test_parameters_against_the_reference():
    """Others get what is nearest; the owner's own part stays exact; what is lost is what came last, in codes."""
    size, elements = 3, 32
    config = LossyConfig(**CODED | {"p_param": 0.45, "grad_wire": "raw"})
    plain = dataclasses.replace(config, packet_bytes=4 * elements, param_wire="raw")
    lossy = LossyWorkers(config, [BucketSpec(shard) for shard in SHARDS], size)
    mine = [[torch.zeros(size * shard) for shard in SHARDS] for _ in range(size)]
    for step in range(4):
        arrived = deliveries(plain, "param", size, SHARDS, step)
        for bucket, shard in enumerate(SHARDS):
            fresh = np.array([gradients(step, rank, 1, shard) for rank in range(size)])
            old = np.array([replicas[bucket].numpy().reshape(size, shard) for replicas in mine])
            crossing = np.array([decoded(values, 8, elements) for values in fresh])
            units = [slice(a, a + elements) for a in range(0, shard, elements)]
            expected = reference_gather(old, crossing, arrived[bucket], units)
            expected[range(size), range(size)] = fresh
            own = [torch.from_numpy(values.copy()) for values in fresh]
            lossy.all_gather(bucket, [replicas[bucket] for replicas in mine], own, step)
            for rank in range(size):
                got = mine[rank][bucket].numpy().reshape(size, shard)
                np.testing.assert_array_equal(got, expected[rank])
                np.testing.assert_array_equal(own[rank].numpy(), fresh[rank])


# --- ranks and virtual workers ---------------------------------------------------------------------------------------

CASES = [
    *({"grad_recovery": rule} for rule in RULES[:4]),
    {"grad_recovery": "renormalize", "lossy_self": True},
    {"grad_wire": "int4", "param_wire": "raw", **FEEDBACK},
    {"param_send": "compensated", **FEEDBACK},
    {"loss_unit": "shard", "param_wire": "raw"},
    {"p_grad": 0.0, "p_param": 0.0},
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workers_are_ranks_bit_for_bit(size, dtype):
    """With any number of ranks: nobody else chooses the order of the sum."""
    configs = [LossyConfig(**LOSSY | CODED | flags, transport="pieces") for flags in CASES]
    calls = [(size, config, dtype, False) for config in configs]
    ranks = run_ranks(each, size, in_memory.real, calls)
    for number, config in enumerate(configs):
        both = in_memory.simulated(size, config, dtype, False)
        raw = dataclasses.replace(config, grad_wire="raw", param_wire="raw", packet_bytes=128)
        other = in_memory.simulated(size, raw, dtype, False)
        for rank in range(size):
            assert_same([workers[rank] for workers in both], ranks[rank][number], str(config))
        assert any(not np.array_equal(a[0][0], b[0][0]) for a, b in zip(both, other)), (
            config
        )  # or the codes did nothing


def megatron_cases():
    base = LossyConfig(**LOSSY | CODED | {"packet_bytes": 264, "wire_block": 64}, transport="pieces")
    fp16 = {"dtype": "fp16", "initial_loss_scale": 2.0**18}  # overflows in the first two steps
    for name, model, flags in (
        *((f"overlap {name}", {"layers": 1, **overlap}, {}) for name, overlap in OVERLAPS.items()),
        ("int4, previous", {"layers": 1}, {"grad_wire": "int4", "grad_recovery": "previous"}),
        ("feedback, bf16", {"layers": 1, "dtype": "bf16", **OVERLAPS["both"]}, FEEDBACK),
        ("bf16 accumulation", {"layers": 1, "dtype": "bf16", "accumulation": 2}, {}),
        ("compensated", {"layers": 1}, {"param_send": "compensated"}),
        ("overflow", {"layers": 1, **fp16}, {"grad_recovery": "previous"}),
        ("nothing lost", {"layers": 1}, {"p_grad": 0.0, "p_param": 0.0}),
        ("gradients alone", {"layers": 1}, {"param_wire": "raw"}),
        ("parameters alone", {"layers": 1}, {"grad_wire": "raw"}),
    ):
        yield name, model | {"clip_grad": 0.0}, dataclasses.replace(base, **flags)


@pytest.mark.on_cuda
@pytest.mark.shows("coded exchanges: N ranks are N virtual workers, bit for bit")
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_megatron_on_ranks_is_megatron_on_virtual_workers(size):
    """Without clipping: torch adds up the gradient norm of the ranks in an order of its own."""
    chosen = list(megatron_cases())
    real = run_ranks(real_runs, size, chosen)
    for transport in ("pieces", "torch"):
        [virtual] = run_ranks(virtual_runs, 1, [
            (name, model, dataclasses.replace(config, transport=transport)) for name, model, config in chosen
            if transport == "pieces" or config.grad_wire != "raw"
        ], size)  # fmt: skip
        assert_workers_are_ranks(virtual, real)
    coded = [name for name, _, config in chosen if config.param_wire != "raw"]
    for name in coded:
        _, _, replica, owners = real[0][name][-1]
        assert any(not np.array_equal(replica[key], owners[key]) for key in replica), name


def bytes_that_cross(rank, config):
    """The bytes that this rank hands to torch, by phase."""
    counted, whole = {"grad": 0, "param": 0}, (dist.all_to_all_single, dist.all_gather)

    def scatter(output, input, **options):
        counted["grad"] += input.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()
        return whole[0](output, input, **options)

    def gather(outputs, input, **options):
        counted["param"] += input.nbytes * (dist.get_world_size() - 1)
        return whole[1](outputs, input, **options)

    dist.all_to_all_single, dist.all_gather = scatter, gather
    group = LossyGroup.create(config, [BucketSpec(10_000)])
    replica = torch.randn(20_000)
    lossy_reduce_scatter(group, 0, torch.empty(10_000), torch.randn(20_000), 0)
    lossy_all_gather(group, 0, replica, replica[rank * 10_000 : (rank + 1) * 10_000].clone(), 0)
    dist.all_to_all_single, dist.all_gather = whole
    assert {phase: group.wire.shard_bytes[phase] for phase in counted} == counted
    return counted


def test_bytes_are_really_saved():
    packets = {"loss_unit": "packet", "packet_bytes": 1408, "transport": "pieces"}
    for grad, param, saved in (("raw", "raw", (1, 1)), ("int8", "int8", (3.93, 3.93)), ("int4", "int8", (7.73, 3.93))):
        config = LossyConfig(**packets, grad_wire=grad, param_wire=param)
        for counted in run_ranks(bytes_that_cross, 2, config):
            assert 40_000 / counted["grad"] == pytest.approx(saved[0], rel=0.01)
            assert 40_000 / counted["param"] == pytest.approx(saved[1], rel=0.01)


@pytest.mark.parametrize(("flags", "omega"), [({"grad_wire": "int8"}, 6e-5), ({"grad_wire": "int4"}, 0.0205)])
def test_metrics_are_bytes_and_rounding(flags, omega):
    """omega is kappa^2 / (6 L^2); kappa^2 of 32 normal values is about 5."""
    config = LossyConfig(**CODED | {"packet_bytes": 100} | flags)
    lossy = LossyWorkers(config, [BucketSpec(3200)], 4)
    monitor = WireMonitor(SimpleNamespace(groups=lossy.groups, config=config))
    for step in range(3):
        grads = [torch.randn(4 * 3200, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
        lossy.reduce_scatter(0, [torch.empty(3200) for _ in range(4)], grads, step)
        monitor.finish_iteration(step, step != 1, list)
    saved = monitor.state_dict()
    metrics = monitor.metrics()
    code = BlockCode(int(flags["grad_wire"].removeprefix("int")), 32)
    grad, param = code.size(32) * 100, BlockCode(8, 32).size(32) * 100
    assert metrics["wire bytes"] == 4 * 3 * (3 * grad + 2 * param)
    assert metrics["wire rounding"] == pytest.approx(omega, rel=0.15)
    assert monitor.metrics() == {"wire bytes": 0.0}
    monitor.load_state_dict(saved)
    assert monitor.metrics() == metrics


def test_one_line_where_codes_round_much_away(caplog):
    config = LossyConfig(**CODED | {"grad_wire": "int4", "packet_bytes": 300, "wire_block": 256})
    lossy = LossyWorkers(config, [BucketSpec(2560)], 2)
    monitor = WireMonitor(SimpleNamespace(groups=lossy.groups, config=config))
    for step in range(3):
        # One element of a block far above the others.
        grads = [torch.randn(2 * 2560, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        for gradient in grads:
            gradient[::256] *= 15
        lossy.reduce_scatter(0, [torch.empty(2560) for _ in range(2)], grads, step)
        assert monitor.metrics()["wire rounding"] > 0.2
    [record] = caplog.records
    assert "--grad-wire int4: int4 rounds away what a loss of" in record.message


@pytest.mark.shows("codes on a pretended device: a CPU's bits, and no wait")
@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"grad_wire": "int4", "param_wire": "raw", "grad_recovery": "previous"},
        {"transport": "pieces", "grad_recovery": "renormalize-remote"},
        LITTLE,
    ],
    ids=["udp", "int4 alone", "pieces", "windows"],
)
def test_codes_of_a_device_are_those_of_a_cpu(flags):
    """No race between streams, and no wait of the thread that computes."""
    of_device = {"packet_bytes": 68, "wire_block": 64, "grad_wire": "int8", "param_wire": "int8"}
    for equal, faults, counts, _ in on_a_device(2, **of_device | flags):
        assert equal and not faults, faults
        here = {kind: count for (kind, aside), count in counts.items() if kind == "synchronisation" and not aside}
        assert not here, counts
