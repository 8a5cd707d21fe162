"""Names that torch has given up: a run of ours does not make torch warn of them."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist

from megatron_lossy.config import LossyConfig
from megatron_lossy.monitor.window import of_all_ranks
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_all_gather, lossy_reduce_scatter
from tests.ranks import run_ranks
from tests.trainer import ROOT

pytestmark = pytest.mark.shows("no call of what torch has given up", device=False)

OLD = re.compile(r"dist(ributed)?\.(reduce_scatter_tensor|all_gather_into_tensor|_\w+_base|\w+_coalesced)\b")


def test_the_old_names_of_collectives_are_in_one_file():
    """Torch's warning names a file of its own, whoever calls."""
    files = [*(ROOT / "megatron_lossy").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    assert [file.name for file in files if OLD.search(file.read_text())] == ["collectives.py"]


def own_loop(rank: int) -> None:
    import numpy as np

    warnings.simplefilter("error", FutureWarning)
    warnings.simplefilter("error", DeprecationWarning)
    group = LossyGroup.create(LossyConfig(p_grad=0.1, p_param=0.1), [BucketSpec(4)])
    shard, params = torch.empty(4), torch.ones(8)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        lossy_reduce_scatter(group, 0, shard, params.clone(), 0, op=op)
    lossy_all_gather(group, 0, params, shard, 0)
    of_all_ranks(np.ones(3))


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="this torch knows the old names alone")
def test_torch_does_not_warn_of_an_own_loop():
    run_ranks(own_loop, 2)
