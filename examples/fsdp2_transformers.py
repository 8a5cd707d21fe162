"""A LLaMA of Hugging Face ``transformers``, sharded by FSDP2, trained with loss. On any machine, without a download:

pip install -e '.[transformers]'
torchrun --nproc-per-node 2 examples/fsdp2_transformers.py --p-grad 0.1 --p-param 0.1
torchrun --nproc-per-node 2 examples/fsdp2_transformers.py --transport udp
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_lossy.base.errors import ArgumentParser, usage_errors
from megatron_lossy.base.flags import from_namespace
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.loss_flags import add_loss_flags, with_preset
from megatron_lossy.pytorch import make_lossy

VOCABULARY, LENGTH, BATCH = 256, 64, 8


def build():
    """Return a model of 0.2 M parameters, each of its layers and the rest a parameter group."""
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **size))
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def batches(steps):
    """Yield sequences that count upwards, each with its own stride."""
    chance = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        first, stride = torch.randint(VOCABULARY, (2, BATCH, 1), generator=chance)
        yield (first + stride % 7 * torch.arange(LENGTH)) % VOCABULARY


def train(steps, config):
    """Train, and return the loss of each step."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lossy = make_lossy(model, optimizer, config, steps=steps)
    losses = []
    for tokens in batches(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    measured = lossy.metrics()
    lossy.close()
    return losses, measured


if __name__ == "__main__":
    with usage_errors("fsdp2_transformers.py"):
        parser = add_loss_flags(ArgumentParser(), "loss")
        parser.add_argument("--steps", type=int, default=50)
        chosen = parser.parse_args(with_preset(sys.argv[1:]))
        config = from_namespace(LossyConfig, chosen)
        dist.init_process_group("gloo")
        losses, measured = train(chosen.steps, config)
        if dist.get_rank() == 0:
            print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {config.describe()}")
            print({name: round(value, 4) for name, value in measured.items() if name.startswith("loss rate")})
        dist.destroy_process_group()
