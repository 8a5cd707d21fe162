"""Megatron on CPU: what is replaced, and that all of it can be undone; devices, and ranks that start again."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import time
import types
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed

from megatron_lossy.base import device
from megatron_lossy.base.device import cpu, optimizer
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.carrying import Collectives
from megatron_lossy.mechanisms.islands.world import IslandWorld
from megatron_lossy.run.monitor.window import of_all_ranks
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_all_gather, lossy_reduce_scatter
from tests.ranks import logged, run_ranks
from tests.tiny_gpt import TinyGPT, build
from tests.trainer import ROOT, TINY, TrainConfig

pytestmark = pytest.mark.shows(
    "Megatron on CPU: stand-ins, random streams, experts",
    "ranks that torchrun starts again do not look for those before them",
    "no call of what torch has given up",
    device=False,
)

takes_its_device = pytest.mark.shows("each rank takes the device of its LOCAL_RANK (simulated)")


def _attributes(targets):
    """Return the value of each ``module:path``; None where it is missing, or a class only inherits it."""
    found = {}
    for target in targets:
        module, _, path = target.partition(":")
        *parents, name = path.split(".")
        owner = importlib.import_module(module)
        for parent in parents:
            owner = getattr(owner, parent)
        found[target] = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name, None)
    return found


def _install_and_undo(rank):
    patches = [*cpu.patches(), *optimizer.patches()]
    targets = [patch.target for patch in patches]
    before = _attributes(targets)
    untouched = not device.CORE.installed and isinstance(torch.zeros, types.BuiltinFunctionType)
    kinds = [device.prepare(), device.prepare(), device.backend(), str(device.current_device())]
    during = _attributes(targets)
    device.CORE.uninstall()
    device.OPTIMIZER.uninstall()
    after = _attributes(targets)
    return {
        "untouched": untouched,
        "kinds": kinds,
        "same": [target for target in targets if during[target] is before[target]],
        "unrestored": [target for target in targets if after[target] is not before[target]],
    }


def test_patches_come_only_with_prepare_and_go_without_a_trace():
    (result,) = run_ranks(_install_and_undo, 1)
    assert result["untouched"]
    assert result["kinds"] == ["cpu", "cpu", "gloo", "cpu"]
    assert result["same"] in ([], ["megatron.core.transformer.moe.moe_utils:te_general_gemm"])  # None for none
    assert not result["unrestored"]


@pytest.mark.programs
def test_megatron_is_imported_without_the_compiler():
    """Functions that torch.compile would decorate stay as they are, and 1.5 s of imports are not made."""
    code = "from megatron_lossy.base import device; device.prepare_import(); import sys, torch, megatron.core.models.gpt as gpt; "
    code += "from megatron.core.fusions import fused_bias_swiglu as fused; "
    code += "print('torch._inductor' in sys.modules, type(fused.swiglu).__name__, torch.compile(dynamic=True)(fused.swiglu) is fused.swiglu)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False function True\n", done.stderr


def _without_megatron_training(rank):
    try:
        device.prepare(megatron_training=True)
    except UsageError as error:
        return str(error), device.TRAINING.installed, torch.cuda.device_count()
    return None


@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is not None, reason="has megatron.training")
def test_without_megatron_training_says_what_is_missing_and_changes_nothing():
    ((message, installed, devices),) = run_ranks(_without_megatron_training, 1)
    assert "megatron.training" in message
    assert not installed and devices == 0


def test_does_not_switch_to_the_cpu_under_a_running_accelerator(monkeypatch):
    monkeypatch.setattr(device, "_device_type", "cuda")
    with pytest.raises(RuntimeError, match="already uses cuda"):
        device.prepare(cpu=True)


def _stand_ins(rank):
    device.prepare()
    on_cuda = [
        torch.zeros(2, device="cuda"),
        torch.ones(2, device=torch.device("cuda", 1)),
        torch.tensor([1.0, 2.0], device="cuda:0"),
        torch.empty(2, device="cuda", pin_memory=True),
        torch.zeros_like(torch.ones(2), device=torch.cuda.current_device()),
        torch.nn.Linear(2, 2).cuda().weight,
    ]
    compiled = torch.compile(lambda x: x if torch.compiler.is_compiling() else x + 1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    side = torch.cuda.Stream(device=torch.cuda.current_device())
    context = torch.cuda.stream(side)
    entered = []
    for _ in range(2):
        with context:
            start.record()
            side.wait_stream(torch.cuda.default_stream())
            entered.append(torch.cuda.current_stream() is side)
    end.record()
    end.synchronize()
    return {
        "devices": {tensor.device.type for tensor in on_cuda},
        "names": [torch.zeros(1, dtype=dtype).type() for dtype in (torch.float32, torch.bfloat16)],
        "converts": torch.zeros(1).type(torch.int64).dtype == torch.int64,
        "entered": entered,
        "left": torch.cuda.current_stream() is torch.cuda.default_stream(),
        "elapsed": start.elapsed_time(end),
        "eager": compiled(torch.zeros(1)).item(),
    }


def test_stand_ins_behave_as_their_originals():
    (result,) = run_ranks(_stand_ins, 1)
    assert result["devices"] == {"cpu"}
    assert result["names"] == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"]
    assert result["converts"]
    assert result["entered"] == [True, True] and result["left"]
    assert result["elapsed"] > 0 and result["eager"] == 1


def _random_streams(rank):
    device.prepare()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    messages = logged()

    def draws(forks):
        """Four numbers outside the tracker's stream and, before each, ``forks`` numbers from inside."""
        model_parallel_cuda_manual_seed(5)
        outside, inside = [], []
        for _ in range(4):
            with get_cuda_rng_tracker().fork():
                inside += torch.rand(forks).tolist()
                with get_cuda_rng_tracker().fork():
                    inside += torch.rand(forks).tolist()
            outside.append(torch.rand(1).item())
        return outside, inside

    def gradient(run):
        model_parallel_cuda_manual_seed(5)
        x = torch.ones(64, requires_grad=True)
        run(lambda y: torch.nn.functional.dropout(y, 0.5) * y, x).sum().backward()
        return x.grad.tolist(), torch.rand(1).item()

    return {
        "few": draws(1),
        "many": draws(3),
        "kept": gradient(lambda function, x: function(x)),
        "recomputed": gradient(lambda function, x: checkpoint(function, False, x)),
        "messages": messages,
    }


def test_random_streams_are_separate_and_survive_recomputation():
    (result,) = run_ranks(_random_streams, 1)
    outside, inside = result["few"]
    assert result["many"][0] == outside  # what happens inside does not move the outer stream
    assert len({*inside, *outside}) == len(inside) + len(outside)
    assert result["many"][1][: len(inside)] == inside  # and nested forks go on with one stream
    assert result["recomputed"] == result["kept"]
    assert not [message for message in result["messages"] if "RNG" in message]


def _exchange_tokens(rank):
    """Losses of a model whose experts get their tokens by an all-to-all, as those of sequences of several lengths do."""
    run = build(TinyGPT(expert=2, experts=4, overlap_grad_reduce=True, lengths=(16,)))
    reports = [run.step(step) for step in range(8)]
    assert all(report["success"] and np.isfinite(report["grad_norm"]) for report in reports)
    return [report["loss"] for report in reports]


@pytest.mark.slow
def test_experts_that_exchange_tokens_train():
    """Other models: every value of an exchange in test_hooks.py, losses of TP 2 and PP 2 in test_train.py."""
    losses = np.mean(run_ranks(_exchange_tokens, 4), axis=0)
    assert losses[-3:].mean() < losses[:3].mean() - 0.05


# --- several accelerators, simulated ---------------------------------------------------------------------------------


class Accelerators:
    """In the place of ``torch.cuda`` or ``torch.hpu``: so many devices, and a note of what is asked of them."""

    def __init__(self, count):
        self.count = count
        self.current = 0
        self.asked = []

    def device_count(self):
        return self.count

    def set_device(self, number):
        assert number < self.count
        self.current = number
        self.asked.append(("set_device", number))

    def current_device(self):
        return self.current


@pytest.fixture
def node(monkeypatch):
    """``node(kind, count, **environment)``: this process is a rank on a node with ``count`` accelerators."""

    def make(kind, count, **environment):
        accelerators = Accelerators(count)
        monkeypatch.setattr(device, "_device_type", kind)
        if kind == "cuda":
            for name in ("device_count", "set_device", "current_device"):
                monkeypatch.setattr(torch.cuda, name, getattr(accelerators, name))
        else:
            monkeypatch.setattr(torch, kind, accelerators, raising=False)
        if kind == "hpu":
            for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.distributed"):
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
            backend = types.ModuleType("habana_frameworks.torch.distributed.hccl")
            monkeypatch.setitem(sys.modules, backend.__name__, backend)

        def init_process_group(backend, **options):
            assert "device_id" not in options  # torch would connect all groups of Megatron at once
            accelerators.asked.append(("init_process_group", backend))

        monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        return accelerators

    return make


@takes_its_device
@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("hpu", "hccl")])
def test_a_rank_takes_the_device_of_its_local_rank_before_any_group(node, monkeypatch, kind, backend):
    """A rank of the second node, say. Simulated: nobody has run several accelerators."""
    from megatron_lossy.lab.train.model import world

    accelerators = node(kind, 8, RANK=11, LOCAL_RANK=3, WORLD_SIZE=16)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    with world(TrainConfig(**TINY, data_path=("x",), valid_data_path=("y",))):
        assert device.current_device() == torch.device(kind, 3)
    assert accelerators.asked == [("set_device", 3), ("init_process_group", backend)]


@takes_its_device
def test_without_a_launcher_a_program_stays_on_its_device(node):
    accelerators = node("cuda", 2)
    accelerators.current = 1
    device.init_process_group(rank=0, world_size=1)
    assert accelerators.asked == [("init_process_group", "nccl")]
    assert device.current_device() == torch.device("cuda", 1)
    assert node("cpu", 0, LOCAL_RANK=3, WORLD_SIZE=4) and device.take_device() == torch.device("cpu")


@takes_its_device
def test_ranks_share_devices_where_nccl_lets_them(node):
    accelerators = node("cuda", 2, LOCAL_RANK=3, WORLD_SIZE=4, NCCL_MULTI_RANK_GPU_ENABLE=1)
    assert device.take_device() == torch.device("cuda", 1) and accelerators.asked == [("set_device", 1)]


@takes_its_device
@pytest.mark.parametrize(
    ("kind", "count", "environment", "message"),
    [
        ("cuda", 1, {"LOCAL_RANK": 3, "WORLD_SIZE": 4}, "LOCAL_RANK 3: this rank sees 1 cuda device, numbered "),
        ("hpu", 4, {"LOCAL_RANK": 7, "WORLD_SIZE": 8}, "LOCAL_RANK 7: this rank sees 4 hpu devices, numbered from 0; "),
        ("cuda", 4, {"WORLD_SIZE": 4}, "LOCAL_RANK is not set: the launcher must say which device of its node"),
    ],
)
def test_a_rank_without_a_device_is_refused(node, tmp_path, kind, count, environment, message):
    """By the trainer, before any process group and before anything is written."""
    from megatron_lossy.lab.train.loop import train

    accelerators = node(kind, count, RANK=0, **environment)
    settings = {"data_path": ("x",), "eval_iters": 0, "save": str(tmp_path / "run")}
    with pytest.raises(UsageError) as caught:
        train(TrainConfig(**TINY | settings), LossyConfig(p_grad=0.1))
    assert str(caught.value).startswith(message)
    assert not accelerators.asked and not list(tmp_path.iterdir())


@takes_its_device
def test_every_process_group_of_ours_is_made_on_the_ranks_device():
    files = [*ROOT.glob("megatron_lossy/**/*.py"), *ROOT.glob("benchmarks/*.py")]
    calls = ("dist.init_process_group(", "distributed.init_process_group(")
    found = [file for file in files if any(call in file.read_text() for call in calls)]
    assert found == [ROOT / "megatron_lossy" / "base" / "device" / "__init__.py"]


# --- ranks that torchrun starts again, with one store that outlives them (megatron_lossy/base/device/attempt.py) -----


WAIT = timedelta(seconds=60)


@pytest.fixture
def served():
    """The store that torchrun serves in its own process, over all attempts."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def attempt(rank: int, port: int, late: list[float], islands: int, wait: timedelta = WAIT) -> list[float]:
    """Return the sums of a group of this attempt, and of one between islands. A rank comes ``late`` by seconds."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device.prepare()
    time.sleep(late[rank])
    total = torch.ones(1)
    if islands == 1:
        device.init_process_group(timeout=wait)
        torch.distributed.all_reduce(total)
        return total.tolist()
    world = IslandWorld(islands)
    world.open(device.init_process_group, wait)
    torch.distributed.all_reduce(total)
    return [*total.tolist(), *Collectives(world, "test").total(torch.ones(1)).tolist()]


@pytest.mark.parametrize(("islands", "sums"), [(1, [4]), (2, [2, 2])])
@pytest.mark.slow
def test_ranks_do_not_look_for_those_before_them(served, islands, sums):
    """The first rank of an attempt finds the keys of dead ranks in the store."""
    for late in ([0, 0, 0, 0], [0.6, 0, 0.3, 0], [0, 0.6, 0, 0.3]):
        got = run_ranks(attempt, 4, served.port, late, islands, grouped=False)
        assert got == [sums] * 4, late


def alone(rank: int, port: int, who: int) -> str:
    os.environ |= {"RANK": str(who), "WORLD_SIZE": "3"}
    try:
        attempt(0, port, [0], 1, timedelta(seconds=1))
    except torch.distributed.DistStoreError as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_rank_that_gives_up_says_for_whom_it_waited_and_harms_nobody(served):
    assert run_ranks(alone, 1, served.port, 0, grouped=False) == ["ranks 1, 2 did not come within 1 s"]
    assert run_ranks(alone, 1, served.port, 1, grouped=False) == ["rank 0 did not come within 1 s"]
    assert run_ranks(attempt, 3, served.port, [0.5, 0, 0], 1, grouped=False) == [[3]] * 3
    assert run_ranks(alone, 1, served.port, 2, grouped=False) == ["rank 0 did not come within 1 s"]
    assert run_ranks(attempt, 3, served.port, [0, 0, 0.5], 1, grouped=False) == [[3]] * 3


# --- names that torch has given up: a run of ours does not make torch warn of them -----------------------------------


OLD = re.compile(r"dist(ributed)?\.(reduce_scatter_tensor|all_gather_into_tensor|_\w+_base|\w+_coalesced)\b")


def test_the_old_names_of_collectives_are_in_one_file():
    """Torch's warning names a file of its own, whoever calls."""
    files = [*(ROOT / "megatron_lossy").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    found = [file.relative_to(ROOT).as_posix() for file in files if OLD.search(file.read_text())]
    assert found == ["megatron_lossy/base/device/__init__.py"]


def own_loop(rank: int) -> None:
    warnings.simplefilter("error", FutureWarning)
    warnings.simplefilter("error", DeprecationWarning)
    group = LossyGroup.create(LossyConfig(p_grad=0.1, p_param=0.1), [BucketSpec(4)])
    shard, params = torch.empty(4), torch.ones(8)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        lossy_reduce_scatter(group, 0, shard, params.clone(), 0, op=op)
    lossy_all_gather(group, 0, params, shard, 0)
    of_all_ranks(np.ones(3))


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="this torch has the old names alone")
def test_torch_does_not_warn_of_an_own_loop():
    run_ranks(own_loop, 2)
