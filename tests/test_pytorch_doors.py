"""Training programs of others with loss: Trainer, Lightning, accelerate and torchtitan, each resumed bit for bit."""

import dataclasses
import functools
import json
import shutil
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron_lossy.base.errors import UsageError
from megatron_lossy.run.saved import REPLICAS
from tests.ranks import run_ranks
from tests.rules import assert_same
from tests.trainer import tensorboard

pytestmark = [
    pytest.mark.shows("Trainer, Lightning, accelerate, torchtitan: log, save and resume bit for bit", device=False),
    pytest.mark.slow,
]

DDP = {"p_grad": 0.3, "loss_unit": "packet", "packet_bytes": 256, "param_sync_interval": 3}
SHARDED = {"p_grad": 0.3, "p_param": 0.3, "loss_unit": "packet", "packet_bytes": 64, "grad_recovery": "previous"}


def counted(function):
    """Let a program of a rank return the number of steps of optimizers as well."""

    @functools.wraps(function)
    def run(*arguments, **how):
        made = []
        hook = register_optimizer_step_post_hook(lambda *_: made.append(None))
        result = function(*arguments, **how)
        hook.remove()
        return len(made), result

    return run


def same(resumed, whole):
    """Half as many steps have led to the same weights at each rank, bit for bit."""
    for (part, ours), (all_, theirs) in zip(resumed, whole, strict=True):
        assert part <= all_ / 2 + 1  # with the step that makes the optimizer's state
        ours, theirs = (one[0] if isinstance(one, tuple) else one for one in (ours, theirs))
        assert_same(ours, theirs)


def weights_of(model):
    local = ((name, getattr(one, "_local_tensor", one)) for name, one in model.named_parameters())
    return {name.removeprefix("module."): one.detach().float().numpy().copy() for name, one in local}


# --- Trainer -------------------------------------------------------------------------------------------------------


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, number):
        tokens = (number + (number % 7) * torch.arange(16)) % 64
        return {"input_ids": tokens, "labels": tokens}


@counted
def with_trainer(rank, folder, steps, resumes, config, **how):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from megatron_lossy.pytorch.transformers import LossyCallback

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    batches = {"max_steps": steps, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    rate = {"learning_rate": 1e-2, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    files = {"output_dir": folder, "logging_steps": 2, "save_steps": 4, "report_to": ["tensorboard"]}
    args = TrainingArguments(use_cpu=True, ddp_backend="gloo", disable_tqdm=True, **batches, **rate, **files)
    trainer = Trainer(model=model, args=args, train_dataset=Data())
    callback = LossyCallback(trainer, config, **how)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resumes)
    assert callback.lossy is None
    rates = [one["loss rate grad"] for one in trainer.state.log_history if "loss rate grad" in one]
    return weights_of(trainer.model), rates


def test_a_trainer_logs_saves_and_resumes(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    folder, how = str(tmp_path / "out"), {"grouped": False, "timeout": 280}
    events = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "events")}
    whole = run_ranks(with_trainer, 2, folder, 8, None, DDP, environment=events, **how)
    resumed = run_ranks(with_trainer, 2, folder, 8, f"{folder}/checkpoint-4", DDP, **how)
    same(resumed, whole)
    rates = whole[0][1][1]
    assert len(rates) == 4 and all(0.1 < rate < 0.5 for rate in rates[1:])
    assert resumed[0][1][1][-2:] == rates[-2:]
    assert "train/loss rate grad" in tensorboard(tmp_path / "events").Tags()["scalars"]
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert any("loss rate grad" in one for one in state["log_history"])


def refused_then_equal(rank, folder, flags):
    """A checkpoint without files of ours gives a warning; then training starts from it all the same."""
    with pytest.raises(UsageError) as error:
        with_trainer(rank, folder, 8, f"{folder}/checkpoint-4", flags)
    _, (weights, _) = with_trainer(rank, folder, 8, f"{folder}/checkpoint-4", flags, resume=False)
    return str(error.value), weights


def test_a_trainer_may_begin_to_lose_after_a_checkpoint(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    folder, how = str(tmp_path), {"grouped": False, "timeout": 280}
    lossless = run_ranks(with_trainer, 2, folder, 8, None, {}, **how)
    shutil.rmtree(tmp_path / "checkpoint-4" / REPLICAS)
    for rank, (line, weights) in enumerate(run_ranks(refused_then_equal, 2, folder, DDP, **how)):
        missing = f"{REPLICAS}/rank_{rank:05d}.pt"
        assert line.startswith(f"checkpoint {folder}/checkpoint-4: has no {missing}: it was saved without make_lossy")
        assert any(not np.array_equal(lossless[rank][1][0][name], value) for name, value in weights.items())


# --- Lightning -----------------------------------------------------------------------------------------------------


@counted
def with_lightning(rank, folder, epochs, resumes, kind, config, world=2):
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import FSDPModule, fully_shard

    from megatron_lossy.pytorch.lightning import LossyCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

        def configure_model(self):
            if kind == "fsdp2" and not isinstance(self.net, FSDPModule):
                mesh = self.device_mesh["data_parallel"]
                for layer in (self.net[0], self.net[2]):
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch, number):
            return self.net(batch).square().mean()

        def validation_step(self, batch, number):
            self.log("validation", self.net(batch).square().mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategies = {
        "ddp": lambda: DDPStrategy(process_group_backend="gloo", find_unused_parameters=True),
        "fsdp2": lambda: ModelParallelStrategy(
            data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo"
        ),
    }
    data = torch.utils.data.DataLoader(torch.randn(64, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)
    how = {"accelerator": "cpu", "devices": world, "strategy": strategies[kind](), "use_distributed_sampler": True}
    how |= {"max_epochs": epochs, "log_every_n_steps": 4, "accumulate_grad_batches": 2, "default_root_dir": folder}
    how |= {"callbacks": [LossyCallback(config), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)]}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(logger=CSVLogger(folder), **how, **quiet)
    model = Model()
    trainer.fit(model, data, data, ckpt_path=resumes)
    return weights_of(model)


@pytest.mark.parametrize(("kind", "config"), [("ddp", DDP), ("fsdp2", SHARDED)])
def test_lightning_logs_saves_and_resumes(kind, config, tmp_path):
    pytest.importorskip("lightning")
    folder, how = str(tmp_path / "whole"), {"grouped": False, "timeout": 280}
    whole = run_ranks(with_lightning, 2, folder, 4, None, kind, config, **how)
    [metrics] = (tmp_path / "whole").rglob("metrics.csv")
    assert "loss rate grad" in metrics.read_text().splitlines()[0]
    resumed = run_ranks(with_lightning, 2, str(tmp_path / "on"), 4, f"{folder}/epoch=1.ckpt", kind, config, **how)
    same(resumed, whole)
    lossless = run_ranks(with_lightning, 2, str(tmp_path / "lossless"), 4, None, kind, {}, **how)
    assert any(not np.array_equal(lossless[0][1][name], value) for name, value in whole[0][1].items())


# --- accelerate ----------------------------------------------------------------------------------------------------


@counted
def with_accelerate(rank, folder, steps, resumes, config):
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    from megatron_lossy.pytorch import make_lossy

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    lossy = make_lossy(model, optimizer, config)
    if resumes:
        accelerator.load_state(folder)
        lossy.load(folder)
    for step in range(steps // 2 if resumes else 0, steps):
        for part in range(2):
            with accelerator.accumulate(model):
                chance = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
                loss = model(torch.randn(4, 8, generator=chance)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if not resumes and step == steps // 2 - 1:
            accelerator.save_state(folder)
            lossy.save(folder)
    assert lossy.iteration == steps
    rate = lossy.metrics()["loss rate grad"]
    lossy.close()
    return weights_of(model), rate


def test_accelerate_saves_and_resumes(tmp_path):
    pytest.importorskip("accelerate")
    folder, how = str(tmp_path / "saved"), {"grouped": False, "timeout": 280}
    whole = run_ranks(with_accelerate, 2, folder, 10, False, DDP, **how)
    resumed = run_ranks(with_accelerate, 2, folder, 10, True, DDP, **how)
    same(resumed, whole)
    assert 0.1 < whole[0][1][1] < 0.5


# --- torchtitan ----------------------------------------------------------------------------------------------------


def on_cpu():
    """Let torchtitan, which takes an accelerator for granted, train on a CPU."""
    from torchtitan.tools import utils

    class Module:
        """The functions of ``torch.cuda`` that torchtitan calls."""

        def __getattr__(self, name):
            return getattr(torch.cpu, name)

        def get_device_name(self, device=None):
            return "cpu"

        def get_device_properties(self, device=None):
            return SimpleNamespace(total_memory=2**30, name="cpu")

        def reset_peak_memory_stats(self, device=None):
            pass

        def empty_cache(self):
            pass

        def memory_stats(self, device=None):
            return {}

    utils.device_type, utils.device_module = "cpu", Module()
    from torchtitan.distributed import utils as distributed

    distributed.set_pg_timeouts = lambda **_: None  # it names devices in a barrier, which gloo has not


@counted
def with_torchtitan(rank, folder, steps, config, load_step=-1):
    on_cpu()
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry

    from megatron_lossy.pytorch.torchtitan import with_loss

    class Words(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **_):
            super().__init__()

        def encode(self, *_):
            return []

        def decode(self, *_):
            return ""

        def get_vocab_size(self):
            return 64

    class Batches(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
            self.rank, self.length, self.batch, self.number = dp_rank, seq_len, local_batch_size, 0

        def __iter__(self):
            while True:
                chance = torch.Generator().manual_seed(1000 * self.number + self.rank)
                self.number += 1
                tokens = torch.randint(64, (self.batch, self.length + 1), generator=chance)
                yield {"input": tokens[:, :-1]}, tokens[:, 1:].contiguous()

        def state_dict(self):
            return {f"number_{self.rank}": self.number}

        def load_state_dict(self, state):
            self.number = state[f"number_{self.rank}"]

    plain = config_registry.llama3_debugmodel_ce_loss()
    for layer in plain.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    plain.tokenizer, plain.dataloader, plain.dump_folder = Words.Config(), Batches.Config(), folder
    plain.training = dataclasses.replace(
        plain.training,
        steps=steps,
        seq_len=16,
        local_batch_size=2,
        mixed_precision_param="float32",
        mixed_precision_reduce="float32",
        disable_cuda_graphs=True,
    )
    plain.parallelism = dataclasses.replace(
        plain.parallelism, spmd_backend="partial_dtensor", fsdp_reshard_after_forward="always"
    )
    plain.activation_checkpoint = None
    plain.metrics = dataclasses.replace(plain.metrics, enable_tensorboard=True, log_freq=2)
    plain.checkpoint = dataclasses.replace(
        plain.checkpoint, enable=True, interval=3, load_step=load_step, last_save_model_only=False, keep_latest_k=0
    )
    trainer = with_loss(plain, config).build()
    trainer.train()
    weights = weights_of(trainer.model_parts[0])
    trainer.close()
    return weights


def test_torchtitan_logs_saves_and_resumes(tmp_path):
    pytest.importorskip("torchtitan")
    pytest.importorskip("triton")  # which torchtitan imports, and does not ask for
    how = {"grouped": False, "timeout": 290}
    whole = run_ranks(with_torchtitan, 2, str(tmp_path), 6, SHARDED, **how)
    events = sorted(tmp_path.rglob("events.out*"))
    assert "loss rate grad" in tensorboard(events[0]).Tags()["scalars"]
    resumed = run_ranks(with_torchtitan, 2, str(tmp_path), 6, SHARDED, 3, **how)
    same(resumed, whole)
    lossless = run_ranks(with_torchtitan, 2, str(tmp_path / "lossless"), 6, {}, **how)
    assert any(not np.array_equal(lossless[0][1][name], value) for name, value in whole[0][1].items())
