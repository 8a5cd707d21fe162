"""Cost of loss for an FSDP2 model: time of a step, and bytes sent, over those of plain FSDP2.

    python -m benchmarks.fsdp_step [--ranks 4] [--rounds 24] [--bf16] [--launches 1] [--out benchmarks/results]

Every variant trains the same transformer (20 M parameters), each layer a parameter group that is resharded after the forward
pass. The variants take turns, one step each, and the order rotates; the ratio of each is the median over rounds of its
time over the baseline's in the same round. The baseline is there twice: its ratio to itself shows the noise of a ratio.
Bytes are those that a rank gives to collectives for others, counted where torch's collectives are called.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.common import heading
from benchmarks.step_overhead import TimedVariant, compare, program, ratios, spread, turns
from megatron_lossy.base import device
from megatron_lossy.base.device import all_gather_single, reduce_scatter_single
from megatron_lossy.config import LossyConfig
from megatron_lossy.pytorch import make_lossy

BASELINE, AGAIN = "FSDP2", "FSDP2 again"
#: Variant: loss flags; ``None`` is plain FSDP2.
VARIANTS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    AGAIN: None,
    "p = 0": {"p_grad": 0.0, "p_param": 0.0},
    "shard": {"loss_unit": "shard"},
    "packet 4 KiB": {"loss_unit": "packet", "packet_bytes": 4096},
    "packet 4 KiB, compensated": {"loss_unit": "packet", "packet_bytes": 4096, "param_send": "compensated"},
}


@dataclass(frozen=True)
class Settings:
    """The model that is timed."""

    layers: int = 6
    hidden: int = 512
    vocab: int = 1024
    sequence: int = 64
    micro_batch: int = 2
    p: float = 0.1
    rounds: int = 24
    bf16: bool = False

    @property
    def tokens(self) -> int:
        """Tokens per rank and step."""
        return self.sequence * self.micro_batch


class _Counter:
    """torch's own exchange of FSDP2, which counts the bytes that this rank sends to others."""

    def __init__(self, gathers: bool, trainer: Trainer) -> None:
        self._gathers, self._trainer = gathers, trainer

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate as torch does."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any = None, async_op: bool = False
    ) -> Any:
        """As torch does."""
        shard = input_tensor if self._gathers else output_tensor
        self._trainer.own_bytes += (group.size() - 1) * shard.nbytes
        if self._gathers:
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        return reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


class Trainer(TimedVariant):
    """One variant: a model and its optimizer. ``mesh``: of torch; ``None``: one dimension, of all ranks."""

    def __init__(self, settings: Settings, variant: dict[str, Any] | None, mesh: Any = None) -> None:
        self._settings, self.iteration, self.own_bytes = settings, 0, 0
        torch.manual_seed(0)
        width = settings.hidden
        self.model = nn.Sequential(
            nn.Embedding(settings.vocab, width),
            *(
                nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(settings.layers)
            ),
            nn.Linear(width, settings.vocab),
        ).to(device.current_device())
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if settings.bf16 else MixedPrecisionPolicy()
        for layer in self.model[1:-1]:
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.lossy = None
        if mesh is None and variant is None:
            for module in (self.model, *self.model[1:-1]):
                module.set_custom_all_gather(_Counter(True, self))
                module.set_custom_reduce_scatter(_Counter(False, self))
        elif variant is not None:
            config = LossyConfig(**{"p_grad": settings.p, "p_param": settings.p, **variant})
            self.lossy = make_lossy(self.model, self.optimizer, config)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to others."""
        return self.own_bytes if self.lossy is None else sum(self.lossy.sent_bytes.values())

    def step(self) -> None:
        """Forward, backward, update."""
        settings = self._settings
        chance = torch.Generator().manual_seed(1000 * self.iteration + dist.get_rank())
        text = torch.randint(settings.vocab, (settings.micro_batch, settings.sequence + 1), generator=chance)
        text = text.to(device.current_device())
        logits = self.model(text[:, :-1]).float()
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.iteration += 1


def run(settings: Settings) -> dict[str, Any]:
    """Run everything on every rank; the result of rank 0 counts."""
    trainers = {name: Trainer(settings, variant) for name, variant in VARIANTS.items()}
    for trainer in trainers.values():
        trainer.step()  # the first gather is reliable
    before = {name: trainer.sent_bytes for name, trainer in trainers.items()}
    steps = trainers[BASELINE].iteration
    times = {"step": compare(trainers, "step", settings.rounds)}
    sent = {
        name: (trainer.sent_bytes - before[name]) / (trainer.iteration - steps) for name, trainer in trainers.items()
    }
    parameters = sum(parameter.numel() for parameter in trainers[BASELINE].model.parameters())
    return {
        "command": "python -m benchmarks.fsdp_step " + " ".join(sys.argv[1:]),
        "settings": asdict(settings),
        "tokens per rank and step": settings.tokens,
        "parameters": parameters,
        "times": times,
        "bytes sent per step": sent,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    what = (
        f"{result['ranks']} ranks, {result['parameters'] / 1e6:.0f} M parameters, "
        f"{result['tokens per rank and step']} tokens per rank and step, p = {result['settings']['p']}, {turns(result)}"
    )
    steps, sent = ratios(result["times"]["step"]), result["bytes sent per step"]
    lines = [
        *heading("Overhead of loss with FSDP2", result, what),
        "| variant | step, s | step, ratio (quartiles) | bytes sent per step and rank | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, count in sent.items():
        part = steps[name]
        lines.append(
            f"| {name} | {part['seconds']:.3f} | {spread(part)} | {count:,.0f} | {count / sent[BASELINE]:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    program(sys.modules[__name__], Settings, "bf16", "layers", "hidden", "sequence")
