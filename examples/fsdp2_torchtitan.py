"""torchtitan's Llama, sharded by torchtitan's own ``parallelize`` function, trained with loss. On any machine:

pip install -e '.[torchtitan]'
torchrun --nproc-per-node 2 examples/fsdp2_torchtitan.py --p-grad 0.1 --p-param 0.1
torchrun --nproc-per-node 2 examples/fsdp2_torchtitan.py --transport udp
"""

import sys

import torch
import torch.distributed as dist
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

from megatron_lossy.base.errors import ArgumentParser, usage_errors
from megatron_lossy.base.flags import from_namespace
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.loss_flags import add_loss_flags, with_preset
from megatron_lossy.pytorch import make_lossy

TOKENS, LENGTH, BATCH = 64, 32, 4


def build():
    """Return torchtitan's model for tests, of 7 M parameters."""
    torch.manual_seed(0)
    if not torch.accelerator.is_available():
        parallel_dims.device_type = "cpu"  # torchtitan takes CUDA for granted
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", fsdp_reshard_after_forward="always")
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    config = llama3_configs["debugmodel"](attn_backend="flex")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # the others are for CUDA
    with torch.device("meta"):
        model = config.build()
    training = TrainingConfig(seq_len=LENGTH, mixed_precision_param="float32", mixed_precision_reduce="float32")
    how = {"compile_config": CompileConfig(), "ac_config": None, "dump_folder": ""}
    parallelize_llama(model, parallel_dims=dims, training=training, parallelism=parallelism, **how)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def train(steps, config):
    """Train, and return the loss of each step and measurements."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lossy = make_lossy(model, optimizer, config, steps=steps)
    chance, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        first, stride = torch.randint(TOKENS, (2, BATCH, 1), generator=chance)
        tokens = (first + stride % 7 * torch.arange(LENGTH + 1)) % TOKENS
        logits = model(tokens[:, :-1])
        # torchtitan's FSDP adds up gradients: the loss is this rank's share of a mean over all tokens.
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    measured = lossy.metrics()
    lossy.close()
    return losses, measured


if __name__ == "__main__":
    with usage_errors("fsdp2_torchtitan.py"):
        parser = add_loss_flags(ArgumentParser(), "loss")
        parser.add_argument("--steps", type=int, default=30)
        chosen = parser.parse_args(with_preset(sys.argv[1:]))
        config = from_namespace(LossyConfig, chosen)
        dist.init_process_group("gloo")
        losses, measured = train(chosen.steps, config)
        if dist.get_rank() == 0:
            print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}; {config.describe()}")
            print({name: round(value, 4) for name, value in measured.items() if name.startswith("loss rate")})
        dist.destroy_process_group()
