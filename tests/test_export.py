"""Checkpoints of our trainer as models of transformers: the loss is that of the run's last evaluation."""

import pytest
import torch

from megatron_lossy.base.errors import UsageError
from megatron_lossy.lab.data import build_tokenizer
from megatron_lossy.lab.export import main
from megatron_lossy.lab.train.config import TrainConfig
from megatron_lossy.lab.train.data import build_datasets
from megatron_lossy.lab.train.model import world
from tests.ranks import run_ranks
from tests.trainer import TINY, train_runs

pytestmark = pytest.mark.shows("a checkpoint in transformers has the loss of the run", device=False)

MODEL = {"rotary_base": 500, "norm_epsilon": 1e-3, "init_method_std": 0.2, "train_iters": 4}
ISLANDS = {"islands": 2, "sync_method": "parameters", "save_consensus": True}


def evaluated(rank, config):
    """The samples of the evaluation of a run with ``config``."""
    config = TrainConfig(**config)
    with world(config, None):
        _, valid = build_datasets(config, build_tokenizer("byte"))
        samples = [valid[number] for number in range(config.eval_iters * config.global_batch_size)]
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels")}


@pytest.mark.parametrize(
    ("more", "loss", "folder", "whose"),
    [
        ({}, {"p_grad": 0.3, "p_param": 0.3, "eval_weights": "owner"}, "", "owner"),
        ({"share_embeddings_and_output_weights": True}, {}, "", "replica"),
        ({"virtual_workers": 4}, ISLANDS | {"eval_weights": "consensus"}, "consensus", "consensus"),
    ],
)
def test_the_loss_is_the_same(data, tmp_path, more, loss, folder, whose):
    transformers = pytest.importorskip("transformers")
    config = TINY | MODEL | data | more | {"save": str(tmp_path / "run")}
    (([summary], _), *_) = run_ranks(train_runs, 1 if "virtual_workers" in more else 2, (config, loss))
    [samples] = run_ranks(evaluated, 1, config)
    command = [str(tmp_path / "run" / folder), "--hf", str(tmp_path / "model")]
    main(command)
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(command[-1])(samples["tokens"]).logits
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples["labels"].flatten()).item()
    assert abs(found - summary["valid"][whose]) < 1e-5
    with pytest.raises(UsageError, match="holds files already"):
        main(command)


def test_a_folder_of_islands_is_refused_with_the_folders_in_it(tmp_path):
    (tmp_path / "island_0").mkdir()
    with pytest.raises(UsageError, match=r"holds islands: choose \S+island_0$"):
        main([str(tmp_path), "--hf", str(tmp_path / "model")])
