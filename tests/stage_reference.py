"""An asynchronous pipeline computed in one process by its definition (docs/async_pipeline.md), and what its real ranks did.

Each stage is a GPTModel of its own, and keeps all versions of its weights. Update n of stage s of P is made by torch's
AdamW, of the gradient of batch n at the weights after max(0, n-(P-1-s)) updates. Nothing is shared with the schedule,
the stash, or Megatron's optimizer and clipping.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import numpy as np
import torch


def observed_run(rank: int, config: dict, loss: dict, first: dict | None = None) -> dict:
    """Train; the weights of this rank's stage before the first iteration and after each, by name, and the norms.

    ``logged``: on rank 0, (loss, norm of the gradient) of each log line. ``first``: the weights of the whole model to start
    from; default random ones. With virtual stages the stage is the whole model.
    """
    warnings.simplefilter("ignore")
    from megatron_lossy.config import LossyConfig
    from megatron_lossy.lab.async_pipeline.workers import StageWorkers
    from megatron_lossy.lab.train import loop
    from megatron_lossy.lab.train.config import TrainConfig
    from megatron_lossy.lab.train.metrics import Console
    from megatron_lossy.lab.train.workers import Workers

    seen: dict = {"weights": [], "norms": [], "logged": []}

    class Observed(Console):
        def note(self, text):
            pass

        def train(self, record, *_):
            seen["logged"].append((record["lm loss"], record["grad norm"]))

        def valid(self, record):
            pass

    workers = Workers if config.get("virtual_workers") else StageWorkers

    def iterate(self, *arguments, original=workers.iterate):
        [chunk] = self._chunks
        if not seen["weights"]:
            seen["weights"].append(_weights(chunk.module))
        result = original(self, *arguments)
        seen["weights"].append(_weights(chunk.module))
        seen["norms"].append(result[2])
        return result

    def build_model(config, vocab_size, original=loop.build_model):
        [chunk] = original(config, vocab_size)
        for name, parameter in chunk.module.named_parameters() if first else ():
            parameter.data.copy_(torch.from_numpy(first[_in_whole(name.removeprefix("module."), config)]))
        return [chunk]

    workers.iterate, loop.build_model = iterate, build_model
    loop.train(TrainConfig(**config), LossyConfig(**loss), Observed())
    return seen


def _in_whole(name: str, config) -> str:
    """What the parameter ``name`` of this rank's stage is called in the whole model."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    return in_whole(name, stage * config.num_layers // config.pipeline_model_parallel_size)


def in_whole(name: str, before: int) -> str:
    """What the parameter ``name`` of a stage is called in the whole model, with ``before`` layers before the stage."""
    return re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) + before), name)


def _weights(module) -> dict[str, np.ndarray]:
    named = ((name.removeprefix("module."), p) for name, p in module.named_parameters())
    return {name: p.detach().float().numpy().copy() for name, p in named}


def reference(rank: int, config: dict, first: Sequence[dict], stashing: bool = True, ranks: int = 1) -> dict:
    """``weights`` and ``norms`` of every stage, and ``losses``, as :func:`observed_run` of real ranks should find them.

    ``first``: the weights of each stage at the start. ``ranks``: data-parallel. The learning rate is constant.
    """
    warnings.simplefilter("ignore")
    from megatron_lossy.base import device
    from megatron_lossy.lab.data import build_tokenizer
    from megatron_lossy.lab.train import parallel
    from megatron_lossy.lab.train.config import TrainConfig
    from megatron_lossy.lab.train.data import RankBatches, build_datasets

    device.prepare()
    stages = config["pipeline_model_parallel_size"]
    layers = config["num_layers"] // stages
    whole = TrainConfig(**config)
    piece = TrainConfig(**config | {"pipeline_model_parallel_size": 1, "num_layers": layers})
    with parallel.world(piece), parallel.model_parallel(piece):
        tokenizer = build_tokenizer(whole.tokenizer)
        data, _ = build_datasets(whole, tokenizer)
        models = [_stage(piece, tokenizer.vocab_size, s == 0, s == stages - 1) for s in range(stages)]
        batches = [RankBatches(data, whole, 0, rank, ranks) for rank in range(ranks)]
        return _pipedream(whole, models, first, batches, stashing)


def _stage(config, vocab_size, first, last):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_lossy.lab.data import padded_vocab_size
    from megatron_lossy.lab.train.model import transformer_config

    model = GPTModel(
        transformer_config(config),
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=padded_vocab_size(vocab_size, config.make_vocab_size_divisible_by, 1),
        max_sequence_length=config.seq_length,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=config.rotary_base,
    )
    return model.bfloat16() if config.bf16 else model


def _pipedream(config, models, first, batches, stashing) -> dict:
    stages, dtype = len(models), torch.bfloat16 if config.bf16 else torch.float32
    main = [
        [torch.from_numpy(weights[name]).clone() for name, _ in m.named_parameters()]
        for m, weights in zip(models, first)
    ]
    adam = [
        torch.optim.AdamW(w, config.lr, (config.adam_beta1, config.adam_beta2), config.adam_eps, config.weight_decay)
        for w in main
    ]
    history = [[[w.to(dtype).clone() for w in weights]] for weights in main]
    norms: list[list[float]] = [[] for _ in models]
    losses: list[float] = []

    def load(stage, weights):
        for parameter, value in zip(models[stage].parameters(), weights):
            parameter.data.copy_(value)

    micro_batches = config.global_batch_size // config.micro_batch_size // len(batches)
    for n in range(config.train_iters):
        old = [history[s][max(0, n - (stages - 1 - s))] for s in range(stages)]
        gradients = [[torch.zeros_like(w) for w in weights] for weights in main]
        micros = [[next(own) for _ in range(micro_batches)] for own in batches]
        tokens = sum(batch["loss_mask"].sum() for own in micros for batch in own)
        losses.append(0.0)
        for batch in (batch for own in micros for batch in own):
            inputs, outputs = [], []
            for s, model in enumerate(models):
                load(s, old[s])
                if s:
                    inputs.append(outputs[-1].detach().requires_grad_())
                    model.set_input_tensor(inputs[-1])
                outputs.append(model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]))
            loss = (outputs[-1].float() * batch["loss_mask"]).sum()
            losses[-1] += loss.item() / tokens.item()
            if config.calculate_per_token_loss:
                loss = loss / tokens
            else:
                loss = loss / batch["loss_mask"].sum() / (micro_batches * len(batches))
            gradient = None
            for s in reversed(range(stages)):
                load(s, old[s] if stashing else history[s][-1])
                last = s == stages - 1
                torch.autograd.backward(loss if last else outputs[s], None if last else gradient)
                gradient = inputs[s - 1].grad if s else None
                for total, parameter in zip(gradients[s], models[s].parameters()):
                    total += parameter.grad.float()
                    parameter.grad = None
        for s in range(stages):
            norm = torch.linalg.vector_norm(torch.cat([g.view(-1) for g in gradients[s]])).item()
            norms[s].append(norm)
            scale = min(1.0, config.clip_grad / (norm + 1e-6))
            for weight, gradient in zip(main[s], gradients[s]):
                weight.grad = gradient * scale
            adam[s].step()
            history[s].append([w.detach().to(dtype).clone() for w in main[s]])
    names = [[name for name, _ in m.named_parameters()] for m in models]
    return {
        "weights": [
            [dict(zip(names[s], (w.float().numpy() for w in weights))) for weights in history[s]] for s in range(stages)
        ],
        "norms": norms,
        "losses": losses,
    }
