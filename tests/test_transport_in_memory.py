"""All ranks in one process: what two real ranks do, bit for bit; the example of the documentation; what is refused."""

import contextlib
import io
import re

import numpy as np
import pytest
import torch

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual.in_memory import LossyWorkers
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_all_gather, lossy_reduce_scatter
from tests.programs import ROOT
from tests.ranks import each, run_ranks
from tests.rules import assert_same

pytestmark = pytest.mark.shows("all ranks in one process are two ranks, bit for bit")

SHARDS, STEPS = (50, 7), 8
PACKETS = {"loss_unit": "packet", "packet_bytes": 16}
BURSTS = {"loss_model": ("gilbert-elliott:3",)}


class Rank:
    """A worker's part of a descent that uses both exchanges."""

    def __init__(self, rank, size, dtype):
        self.replicas = [torch.ones(size * shard, dtype=dtype) for shard in SHARDS]
        self.owned = [
            replica[rank * shard : (rank + 1) * shard] for replica, shard in zip(self.replicas, SHARDS, strict=True)
        ]
        self.grads = [torch.empty(shard, dtype=dtype) for shard in SHARDS]
        self.random = torch.Generator().manual_seed(rank)

    def gradients(self, bucket):
        replica = self.replicas[bucket]
        return replica + torch.randn(replica.shape, generator=self.random).to(replica.dtype)

    def update(self, bucket):
        self.owned[bucket] -= 0.1 * self.grads[bucket]


def real(rank, size, config, dtype, averaged):
    """Replicas after every step."""
    group = LossyGroup.create(config, [BucketSpec(shard, dtype, dtype) for shard in SHARDS])
    mine, history = Rank(rank, size, dtype), []
    op = torch.distributed.ReduceOp.AVG if averaged else torch.distributed.ReduceOp.SUM
    for step in range(STEPS):
        for bucket in range(len(SHARDS)):
            lossy_reduce_scatter(group, bucket, mine.grads[bucket], mine.gradients(bucket), step, op)
        if step == 4:
            group.finish_step(step, False)
        for bucket in range(len(SHARDS)):
            mine.update(bucket)
            lossy_all_gather(group, bucket, mine.replicas[bucket], mine.owned[bucket], step)
        history.append([replica.float().numpy().copy() for replica in mine.replicas])
    return history


def simulated(size, config, dtype, averaged):
    lossy = LossyWorkers(config, [BucketSpec(shard, dtype, dtype) for shard in SHARDS], size)
    ranks, history = [Rank(rank, size, dtype) for rank in range(size)], []
    for step in range(STEPS):
        for bucket in range(len(SHARDS)):
            grads, pieces = [one.grads[bucket] for one in ranks], [one.gradients(bucket) for one in ranks]
            lossy.reduce_scatter(bucket, grads, pieces, step, averaged)
        if step == 4:
            lossy.finish_step(step, False)
        for bucket in range(len(SHARDS)):
            for one in ranks:
                one.update(bucket)
            lossy.all_gather(
                bucket, [one.replicas[bucket] for one in ranks], [one.owned[bucket] for one in ranks], step
            )
        history.append([[replica.float().numpy().copy() for replica in one.replicas] for one in ranks])
    return history


CASES = [
    *({"grad_recovery": rule} for rule in ("renormalize", "renormalize-remote", "zero", "previous")),
    {"grad_recovery": "renormalize", "lossy_self": True},
    PACKETS | {"grad_recovery": "error-feedback", "grad_priority": "packet-mean:0.2"},
    PACKETS | BURSTS | {"grad_recovery": "error-feedback", "grad_priority": "none", "param_send": "compensated"},
    PACKETS | BURSTS | {"param_send": "compensated", "transport": "pieces"},
    {"p_grad": 0.0},
    {"p_param": 0.0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_workers_are_two_ranks_bit_for_bit(dtype):
    configs = [LossyConfig(**{"p_grad": 0.4, "p_param": 0.4} | flags) for flags in CASES]
    if dtype == torch.bfloat16:  # gloo adds up with a rounding of its own; pieces are rounded once
        configs = [
            LossyConfig(**{"p_grad": 0.4, "p_param": 0.4} | flags | {"transport": "pieces"}) for flags in CASES[3:]
        ]
    calls = [(2, config, dtype, False) for config in configs]
    ranks = run_ranks(each, 2, real, calls)
    for number, config in enumerate(configs):
        both = simulated(2, config, dtype, False)
        for rank in range(2):
            assert_same([workers[rank] for workers in both], ranks[rank][number], str(config))


def test_a_mean_of_three():
    """Up to the order of summation."""
    config = LossyConfig(p_grad=0.4, p_param=0.4)
    three = simulated(3, config, torch.float32, True)
    sums = simulated(3, config, torch.float32, False)
    for rank, history in enumerate(run_ranks(real, 3, 3, config, torch.float32, True)):
        for step, replicas in enumerate(history):
            for bucket, replica in enumerate(replicas):
                np.testing.assert_allclose(three[step][rank][bucket], replica, rtol=1e-4, atol=1e-5)
    assert not np.allclose(three[0][0][0], sums[0][0][0])


def test_the_example_of_the_documentation():
    """As it stands; without loss all replicas would be 0.9^100."""
    page = (ROOT / "docs" / "transport.md").read_text()
    section = page.partition("## All ranks in one process")[2].partition("\n## ")[0]
    [program] = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(program, "docs/transport.md", "exec"), {})
    values = [float(value) for value in said.getvalue().strip("[]\n").split(",")]
    assert len(values) == 4 and all(0 < value < 0.01 for value in values)
    assert any(value != values[0] for value in values)


def test_workers_of_one_process_have_no_datagrams():
    with pytest.raises(UsageError, match="--transport udp: must be torch or pieces"):
        LossyWorkers(LossyConfig(transport="udp"), [BucketSpec(8)], 2)


def test_nodes_are_those_of_the_flag():
    config = LossyConfig(p_grad=0.9, lossy_links="inter-node:2")
    lossy = LossyWorkers(config, [BucketSpec(8)], 4)
    arrived = np.array([lossy.groups[0].delivery("grad", step).arrived[0, :, 0] for step in range(20)])
    assert arrived[:, :2].all() and not arrived[:, 2:].all()
