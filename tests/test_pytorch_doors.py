"""Training programs of others with loss: Trainer, Lightning and accelerate, each resumed bit for bit."""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from megatron_lossy.errors import UsageError
from megatron_lossy.run import REPLICAS
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.shows("Trainer, Lightning, accelerate: log, save and resume bit for bit", device=False),
    pytest.mark.slow,
]

DDP = {"p_grad": 0.3, "loss_unit": "packet", "packet_bytes": 256, "param_sync_interval": 3}
SHARDED = {"p_grad": 0.3, "p_param": 0.3, "loss_unit": "packet", "packet_bytes": 64, "grad_recovery": "previous"}


def same(resumed, whole):
    """Each rank has the same weights, bit for bit."""
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            np.testing.assert_array_equal(ours[name], value, err_msg=name)


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


def with_trainer(rank, folder, steps, resumes, config, **how):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from megatron_lossy.pytorch.transformers import LossyCallback

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    args = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        logging_steps=2,
        save_steps=4,
        report_to=["tensorboard"],
        disable_tqdm=True,
    )
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
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, how = str(tmp_path / "out"), {"grouped": False, "timeout": 280}
    events = {"TENSORBOARD_LOGGING_DIR": str(tmp_path / "events")}
    whole = run_ranks(with_trainer, 2, folder, 8, None, DDP, environment=events, **how)
    resumed = run_ranks(with_trainer, 2, folder, 8, f"{folder}/checkpoint-4", DDP, **how)
    same([weights for weights, _ in resumed], [weights for weights, _ in whole])
    assert len(whole[0][1]) == 4 and all(0.1 < rate < 0.5 for rate in whole[0][1][1:])
    assert resumed[0][1][-2:] == whole[0][1][-2:]
    written = EventAccumulator(str(tmp_path / "events"))
    written.Reload()
    assert "train/loss rate grad" in written.Tags()["scalars"]
    state = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    assert any("loss rate grad" in one for one in state["log_history"])


def refused_then_equal(rank, folder, flags):
    """What is said of a checkpoint without files of ours; then training from it all the same."""
    with pytest.raises(UsageError) as error:
        with_trainer(rank, folder, 8, f"{folder}/checkpoint-4", flags)
    weights, _ = with_trainer(rank, folder, 8, f"{folder}/checkpoint-4", flags, resume=False)
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
        assert any(not np.array_equal(lossless[rank][0][name], value) for name, value in weights.items())


# --- Lightning -----------------------------------------------------------------------------------------------------


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
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategies[kind](),
        max_epochs=epochs,
        logger=CSVLogger(folder),
        log_every_n_steps=4,
        accumulate_grad_batches=2,
        callbacks=[LossyCallback(config), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        use_distributed_sampler=True,
    )
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
    assert any(not np.array_equal(lossless[0][name], value) for name, value in whole[0].items())


# --- accelerate ----------------------------------------------------------------------------------------------------


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
    same([weights for weights, _ in resumed], [weights for weights, _ in whole])
    assert 0.1 < whole[0][1] < 0.5
