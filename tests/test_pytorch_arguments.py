"""``make_lossy`` refuses what it cannot do in one line that names the argument; and it needs no Megatron."""

import contextlib
import dataclasses
import subprocess
import sys
import warnings
from operator import itemgetter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.pytorch import make_lossy
from tests import fsdp, test_pytorch_ddp
from tests.fsdp import Tiny, Training
from tests.test_pytorch import BOTH

pytestmark = pytest.mark.shows("FSDP2 and DDP: bad arguments are refused in one line", device=False)


class Layer(nn.Module):
    """Two parameters of the given types."""

    def __init__(self, *types):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in types)

    def forward(self, x):
        return x @ self.first.to(x.dtype) @ self.second.to(x.dtype)


def adam(model, **how):
    return torch.optim.AdamW(model.parameters(), **how)


def lossy(model=None, optimizer=None, config=BOTH):
    """``make_lossy`` of a model in FSDP2 with AdamW, or of what is given."""
    model = fsdp.build(Tiny()) if model is None else model
    make_lossy(model, adam(model) if optimizer is None else optimizer, config)


def fsdp1():
    lossy(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))


def lbfgs():
    model = fsdp.build(Tiny())
    lossy(model, torch.optim.LBFGS(model.parameters()))


def optimizer_before_sharding():
    model = nn.Linear(4, 4)
    optimizer = adam(model)
    lossy(fully_shard(model), optimizer)


def again(part=lambda model: model):
    run = Training(Tiny(), BOTH)
    lossy(part(run.model), run.optimizer)


def exchanges_of_somebody_else():
    class Other:
        def allocate(self, *size, dtype, device):
            return torch.empty(*size, dtype=dtype, device=device)

    model = fsdp.build(Tiny())
    model[1].set_custom_all_gather(Other())
    lossy(model)


def exchanges_in_other_memory():
    model = fsdp.build(Tiny())
    model[1].set_allocate_memory_from_process_group_for_comm(True)
    lossy(model)


def exchanges_in_symmetric_memory():
    class SymmMemAllGather:  # that of torch is for CUDA alone
        pass

    model = fsdp.build(Tiny())
    model[1]._get_fsdp_state()._fsdp_param_groups[0]._all_gather_comm = SymmMemAllGather()
    lossy(model)


def replicated():
    replicates = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    model = nn.Linear(4, 4)
    replicates.replicate(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",)))
    lossy(model)


def fewer_ranks_in_the_backward_pass():
    block = nn.Linear(4, 4)
    fully_shard(block, reshard_after_forward=2)
    model = fully_shard(nn.Sequential(block, nn.Linear(4, 4)))
    lossy(model)


def parameters_added_later():
    run = Training(Tiny(), BOTH)
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    run.step(0)


def frozen_later():
    run = Training(Tiny(), BOTH)
    run.model[1].up.weight.requires_grad_(False)
    run.step(0)


def unused():
    run = Training(Tiny(), BOTH)
    run.model[1].inner = lambda x: run.model[1].up(x).sum(dim=1, keepdim=True) * torch.ones(11)
    run.step(0)


class Decays(torch.optim.SGD):
    """Decays weights whatever the learning rate is."""

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            one.mul_(0.9)


def decays(lr, closure=None):
    run = Training(Tiny(), None)
    optimizer = Decays(run.model.parameters(), lr=lr)
    lossy(run.model, optimizer)
    run.loss(0).backward()
    optimizer.step(closure)


class TakesScaler(torch.optim.SGD):
    """Unscales gradients by itself, in the way that torch has deprecated."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        return None


def scaler_within_the_optimizer():
    run = Training(Tiny(), None)
    optimizer, scaler = TakesScaler(run.model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    make_lossy(run.model, optimizer, BOTH, scaler=scaler)
    scaler.scale(run.loss(0)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        scaler.step(optimizer)


def scaler_unknown():
    run = Training(Tiny(), None)
    optimizer, scaler = torch.optim.AdamW(run.model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    make_lossy(run.model, optimizer, dataclasses.replace(BOTH, grad_recovery="previous"))
    scaler.scale(run.loss(0)).backward()
    scaler.step(optimizer)


def step_in_the_backward_pass():
    run = Training(Tiny(), None)
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in run.model.parameters()}
    for one, optimizer in optimizers.items():
        one.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    make_lossy(run.model, list(optimizers.values()), BOTH)
    run.loss(0).backward()


def tensor_parallel_over_udp():
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh["tensor"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    lossy(model, config=LossyConfig(transport="udp"))


def islands(model, count):
    """A model whose copies are ``count`` islands, by the flag."""
    config = LossyConfig(islands=count, sync_method="parameters")
    make_lossy(model, adam(model), config)


def two_copies():
    """A model that two of four ranks shard; the other two have another copy."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp.build(Tiny(), mesh["shard"])


def of_ddp(config=test_pytorch_ddp.LOSSY, **how):
    return test_pytorch_ddp.Training(config, how=how)


def hooked_ddp():
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook(None, lambda state, bucket: None)
    lossy(model, config=test_pytorch_ddp.LOSSY)


def ddp_twice():
    run = of_ddp()
    lossy(run.model, run.optimizer, test_pytorch_ddp.LOSSY)


#: How a line begins, and the call that it refuses.
LINES = [
    ("model Linear: has no module of fully_shard, and is no DistributedDataParallel:", lambda: lossy(nn.Linear(4, 4))),
    ("model FullyShardedDataParallel: is of FSDP1, which has no place for exchanges of others; use fully_shard", fsdp1),
    ("optimizer NoneType: must be a torch.optim.Optimizer, or a list of them", lambda: make_lossy([], None, BOTH)),
    ("config float: must be a LossyConfig, a mapping of its flags, the name of a preset,", lambda: lossy(config=0.1)),
    ("--loss-preset papr: must be a file or one of asyncmesh", lambda: lossy(config="papr")),
    ("unknown key p_grd", lambda: lossy(config={"p_grd": 0.1})),
    ("optimizer []: must have at least one optimizer", lambda: lossy(optimizer=[])),
    ("optimizer LBFGS: evaluates weights within a step, which no exchange would send", lbfgs),
    ("optimizer AdamW: has 16 of 16 parameters that are not the", lambda: lossy(optimizer=adam(fsdp.build(Tiny())))),
    ("optimizer AdamW: has 2 of 2 parameters that are not the model's: make it from", optimizer_before_sharding),
    ("model root module: is lossy already: call make_lossy once, for the whole model", again),
    ("model root module: is lossy already: call make_lossy once, for the whole", lambda: again(itemgetter(1))),
    ("model 1: has exchanges of its own (Other): omit set_symm_mem_for_comm, ", exchanges_of_somebody_else),
    ("model 1: has exchanges of its own (ProcessGroupAllocAllGather,", exchanges_in_other_memory),
    ("model 1: has exchanges of its own (SymmMemAllGather): omit", exchanges_in_symmetric_memory),
    ("model root module: is of replicate(), which shards nothing, so that no parameters cross; use", replicated),
    ("model FSDPSequential: has no parameter with a gradient", lambda: lossy(fsdp.build(Tiny()).requires_grad_(False))),
    (
        "model root module: gathers parameters of several types (torch.bfloat16, torch.float32) together",
        lambda: lossy(fully_shard(Layer(torch.float32, torch.bfloat16))),
    ),
    ("reshard_after_forward 2: gathers from fewer ranks in the backward pass", fewer_ranks_in_the_backward_pass),
    ("--islands 2: must be 1: so many groups", lambda: lossy(config=LossyConfig(islands=2, sync_method="parameters"))),
    ("optimizer AdamW: has 17 parameters, and had 16 when make_lossy was called: add them", parameters_added_later),
    ("model 1: reduces ", frozen_later),
    ("model 1: reduces ", unused),
    ("optimizer Decays: changes weights without gradients, or with a learning rate", lambda: decays(0.0)),
    ("optimizer Decays: did not call its closure; call step() without one", lambda: decays(0.1, list)),
    ("optimizer TakesScaler: takes grad_scaler, and does not show which steps it skips", scaler_within_the_optimizer),
    ("scaler None: a GradScaler is in use, and --grad-recovery previous keeps gradients over steps:", scaler_unknown),
    ("optimizer SGD: steps during the backward pass, where no update ends; step after it", step_in_the_backward_pass),
    ("--transport udp: loses other units of each copy of a parameter", tensor_parallel_over_udp),
    ("--islands 4: must be 2: so many groups of ranks shard the model", lambda: islands(two_copies(), 4)),
    ("--islands 2: needs a mesh of one dimension, fully_shard(", lambda: islands(fsdp.build(Tiny(replicas=2)), 2)),
    (
        "--sites 2: needs fully_shard over all ranks, with a mesh of one dimension",
        lambda: lossy(fsdp.build(Tiny(replicas=2)), config=dataclasses.replace(BOTH, sites=2)),
    ),
    ("--p-param 0.1: each replica updates all parameters, and sends none", lambda: of_ddp(LossyConfig(p_param=0.1))),
    ("model DistributedDataParallel: has a communication hook already", hooked_ddp),
    ("model DistributedDataParallel: has a communication hook already", ddp_twice),
]


def said(rank):
    result = ["nothing"] * len(LINES)
    for number, (_, call) in enumerate(LINES):
        with contextlib.suppress(RuntimeError):  # the next reduction finds an exchange that was broken off
            try:
                call()
            except UsageError as error:
                result[number] = str(error)
    return result


def test_bad_arguments_are_refused_in_one_line(pool):
    for lines in pool.run(said, 4):
        for said_line, (line, _) in zip(lines, LINES, strict=True):
            assert said_line.startswith(line) and "\n" not in said_line


def one_rank(rank):
    with pytest.raises(UsageError, match=r"^data-parallel size 1: one rank exchanges nothing"):
        Training(Tiny(), BOTH)
    with fsdp.trained(Training(Tiny(), LossyConfig()), range(1)) as [loss]:
        return loss


def test_one_rank_can_lose_nothing(pool):
    assert pool.run(one_rank, 1)


def exchanges_replaced(rank):
    run = Training(Tiny(), BOTH)
    run.step(0)
    run.model[1].set_custom_reduce_scatter(run.lossy._gathers[0].before[1])
    with pytest.raises(RuntimeError, match="the exchanges of 1 were replaced after make_lossy"):
        run.step(1)
    dist.barrier()


def test_loss_that_would_not_happen_is_an_error(pool):
    pool.run(exchanges_replaced, 2)


BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("megatron", "einops", "psutil", "matplotlib", "tensorboard", "packaging"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from megatron_lossy.config import LossyConfig
from megatron_lossy.pytorch import make_lossy

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters())
lossy = make_lossy(model, optimizer, LossyConfig())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
lossy.close()
print(sorted(name for name in sys.modules if name.partition(".")[0] == "megatron"))
"""


@pytest.mark.shows("FSDP2 and DDP: runs where megatron-core is not installed", device=False)
def test_megatron_is_not_needed(tmp_path):
    done = subprocess.run([sys.executable, "-c", BLOCKED, tmp_path / "store"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
