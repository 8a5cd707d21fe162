"""Forms of gradients and parameters that were not built, beside int8 and int4: what they cost a small model.

    python -m benchmarks.not_built [--seeds 1 2 3] [--iterations 200]

Eight workers train a model of three layers that predicts the next byte of Python's standard library from the four before it, with
AdamW. Each packet of gradients on its way to the owner of its shard is lost with probability p, and owners average what came. Only
gradients lose, but for differences. It is no training of this package, which has none of these forms; codes are its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import RESULTS, made_with, today
from megatron_lossy.base.coding.blocks import BlockCode
from megatron_lossy.base.errors import usage_errors
from megatron_lossy.base.exchange import cut
from megatron_lossy.base.files import write_text
from megatron_lossy.lab.data import stdlib_documents

WORKERS, BATCH, CONTEXT, BYTES = 8, 64, 4, 256
SHAPES = {
    "embedding": (BYTES, 32),
    "first": (128, CONTEXT * 32),
    "second": (128, 128),
    "out": (BYTES, 128),
}
PACKET = 128  # elements; a shard has 72 packets
RATE, WARMUP, BETAS, DECAY = 3e-3, 20, (0.7, 0.95), 0.1
SIZE = sum(a * b for a, b in SHAPES.values())

Gradients = torch.Tensor  # float32[workers, SIZE]


def tensors_of(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """Views of the tensors of a model in ``flat`` [SIZE]."""
    sizes = [a * b for a, b in SHAPES.values()]
    return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), flat.split(sizes), strict=True)}


def loss_of(flat: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Mean loss of the bytes that follow CONTEXT others, of ``text`` int64[B, CONTEXT + 1]."""
    w = tensors_of(flat)
    x = w["embedding"][text[:, :CONTEXT]].flatten(1)
    x = torch.relu(x @ w["first"].T)
    x = x + torch.relu(x @ w["second"].T)
    return torch.nn.functional.cross_entropy(x @ w["out"].T, text[:, CONTEXT])


#: Gradients [workers, SIZE] of replicas [workers, SIZE] on texts [workers, B, CONTEXT + 1].
gradients_of = torch.func.vmap(torch.func.grad(loss_of))


class Network:
    """Loses packets, each on each link by itself; a worker is the owner of an eighth of the elements, and keeps its own."""

    def __init__(self, p: float, seed: int) -> None:
        self._p, self._random = p, torch.Generator().manual_seed(10_000 + seed)
        self._owner = torch.arange(SIZE) * WORKERS // SIZE == torch.arange(WORKERS)[:, None]

    def arrived(self, size: int, packet: int = PACKET) -> torch.Tensor:
        """bool[workers, size]: what arrives of ``size`` elements of each worker, or at each."""
        packets = torch.rand(WORKERS, -(-size // packet), generator=self._random) >= self._p
        return packets.repeat_interleave(packet, dim=1)[:, :size]

    def mean(self, sent: Gradients) -> torch.Tensor:
        """[SIZE]: owners' means of what came."""
        arrived = self.arrived(SIZE) | self._owner
        return torch.where(arrived, sent, 0.0).sum(dim=0) / arrived.sum(dim=0)


class Plain:
    """float32. Subclasses send something else."""

    name = "float32"

    def __init__(self, network: Network) -> None:
        self._network = network

    def mean(self, step: int, gradients: Gradients) -> torch.Tensor:
        return self._network.mean(gradients)


class Coded(Plain):
    """The codes of this package, rounded at random."""

    def __init__(self, network: Network, bits: int) -> None:
        super().__init__(network)
        self._code = BlockCode(bits, PACKET)
        [self._units], _ = cut([SIZE], [4], "packet", 4096, elements=[PACKET])

    def mean(self, step: int, gradients: Gradients) -> torch.Tensor:
        keys = torch.tensor([[step, worker] for worker in range(WORKERS)], dtype=torch.int32)
        return self._network.mean(self._code.round_(gradients.clone(), self._units, keys))


class TopK(Plain):
    """The largest 1 % of each worker's gradient and residual; what is not among them is the next residual."""

    def __init__(self, network: Network, share: float) -> None:
        super().__init__(network)
        self._count, self._residual = round(share * SIZE), torch.zeros(WORKERS, SIZE)

    def mean(self, step: int, gradients: Gradients) -> torch.Tensor:
        whole = gradients + self._residual
        places = whole.abs().topk(self._count, dim=1).indices
        self._residual = whole.scatter(1, places, 0.0)
        came = self._network.arrived(self._count, PACKET // 2)  # a packet has a place beside each value
        values = whole.gather(1, places) * came
        return torch.zeros(WORKERS, SIZE).scatter(1, places, values).mean(dim=0)


class PowerSGD(Plain):
    """Matrices of rank r, with feedback: means of P and of Q are reduced, and P crosses in between.

    ``reliable``: whether the mean of P comes to all; who lost a packet of it has that of the step before there.
    """

    def __init__(self, network: Network, rank: int, reliable: bool) -> None:
        super().__init__(network)
        random = torch.Generator().manual_seed(0)
        self._reliable = reliable
        self._q = {name: torch.randn(shape[1], rank, generator=random) for name, shape in SHAPES.items()}
        self._p = {name: torch.zeros(WORKERS, shape[0], rank) for name, shape in SHAPES.items()}
        self._residual = torch.zeros(WORKERS, SIZE)

    def mean(self, step: int, gradients: Gradients) -> torch.Tensor:
        whole, result = gradients + self._residual, torch.zeros(SIZE)
        each = [tensors_of(row) for row in whole]
        for name, out in tensors_of(result).items():
            matrices = torch.stack([one[name] for one in each])
            p = torch.linalg.qr(self._survivors(matrices @ self._q[name])).Q
            mine = p.expand(WORKERS, *p.shape)
            if not self._reliable:
                came = self._network.arrived(p.numel()).view(mine.shape)
                mine = torch.where(came, mine, self._p[name])
            self._p[name] = mine.clone()
            self._q[name] = self._survivors(matrices.transpose(1, 2) @ mine)
            out.copy_(p @ self._q[name].T)
        self._residual = whole - result
        return result

    def _survivors(self, sent: torch.Tensor) -> torch.Tensor:
        """The mean of what came of ``sent`` [workers, n, r]; zero where nothing did."""
        came = self._network.arrived(sent[0].numel()).view(sent.shape)
        return torch.where(came, sent, 0.0).sum(dim=0) / came.sum(dim=0).clamp(min=1)


class Rotated(Plain):
    """Each value crosses as a part of all packets of a group of 64: what is lost is a little of all of them."""

    def __init__(self, network: Network, group: int = 64) -> None:
        super().__init__(network)
        hadamard = torch.ones(1, 1)
        while len(hadamard) < group:
            hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
        signs = torch.randint(0, 2, (group,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
        self._rotation = hadamard / group**0.5 * signs
        self._filled = -(-SIZE // (group * PACKET)) * group * PACKET

    def mean(self, step: int, gradients: Gradients) -> torch.Tensor:
        rows = torch.nn.functional.pad(gradients, (0, self._filled - SIZE)).view(
            WORKERS, -1, len(self._rotation), PACKET
        )
        turned = (self._rotation @ rows).view(WORKERS, -1)
        came = self._network.arrived(self._filled)
        came[0] |= ~came.any(dim=0)  # as if somebody's own
        mean = torch.where(came, turned, 0.0).sum(dim=0) / came.sum(dim=0)
        return (self._rotation.T @ mean.view(-1, len(self._rotation), PACKET)).reshape(-1)[:SIZE]


class Owners:
    """What workers have of the owners' weights: replicas [workers, SIZE]. ``how``: exact, absolutes, or differences."""

    def __init__(self, start: torch.Tensor, network: Network, how: str) -> None:
        self.weights, self.replicas, self._network, self._how = start, start.repeat(WORKERS, 1), network, how

    def update(self, new: torch.Tensor) -> None:
        if self._how == "exact":
            self.replicas[:] = new
        else:
            came = self._network.arrived(SIZE) | self._network._owner
            sent = new if self._how == "absolutes" else self.replicas + (new - self.weights)
            self.replicas = torch.where(came, sent, self.replicas)
        self.weights = new

    @property
    def off(self) -> float:
        """How far replicas are from the owners' weights, of these."""
        return float((self.replicas - self.weights).norm() / (WORKERS**0.5 * self.weights.norm()))


#: What is compared: how gradients cross, and parameters.
FORMS: dict[str, tuple[Callable[[Network], Plain], str]] = {
    "float32": (Plain, "exact"),
    "int8": (lambda network: Coded(network, 8), "exact"),
    "int4": (lambda network: Coded(network, 4), "exact"),
    "the largest 1 %, with feedback": (lambda network: TopK(network, 0.01), "exact"),
    "PowerSGD, rank 4": (lambda network: PowerSGD(network, 4, True), "exact"),
    "PowerSGD, rank 4, P lost too": (lambda network: PowerSGD(network, 4, False), "exact"),
    "rotated across packets": (Rotated, "exact"),
    "float32, parameters lost too": (Plain, "absolutes"),
    "float32, differences of parameters lost too": (Plain, "differences"),
}


def train(
    form: str, p: float, seed: int, iterations: int, text: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float]:
    """The validation loss of the owners' weights, and how far replicas are off."""
    make, how = FORMS[form]
    random, network = torch.Generator().manual_seed(seed), Network(p, seed)
    start = torch.cat([torch.randn(a * b, generator=random) * b**-0.5 for a, b in SHAPES.values()])
    exchange, owners = make(network), Owners(start, network, how)
    first, second = torch.zeros(SIZE), torch.zeros(SIZE)
    learn, check = text
    for step in range(iterations):
        places = torch.randint(0, len(learn) - CONTEXT, (WORKERS, BATCH, 1), generator=random)
        batch = learn[places + torch.arange(CONTEXT + 1)]
        gradient = exchange.mean(step, gradients_of(owners.replicas, batch))
        gradient *= min(1.0, 1.0 / float(gradient.norm() + 1e-6))
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square(), 1 - BETAS[1])
        rate = RATE * min(1.0, (step + 1) / WARMUP) * (0.1 + 0.45 * (1 + np.cos(np.pi * step / iterations)))
        mean, square = first / (1 - BETAS[0] ** (step + 1)), second / (1 - BETAS[1] ** (step + 1))
        owners.update(owners.weights * (1 - rate * DECAY) - rate * mean / (square.sqrt() + 1e-8))
    windows = check.unfold(0, CONTEXT + 1, 5)
    return float(loss_of(owners.weights, windows)), owners.off


def table(results: dict[tuple[str, float], list[tuple[float, float]]], rates: Sequence[float]) -> list[str]:
    """Markdown: the change of the loss against float32 at the same rate, and how far replicas are off."""
    lines = ["| gradients | " + " | ".join(f"{100 * p:g} % lost" for p in rates) + " | replicas off by |"]
    lines.append("| --- |" + " --- |" * (len(rates) + 1))
    for form in FORMS:
        cells = []
        for p in rates:
            losses, whole = (np.array([one[0] for one in results[name, p]]) for name in (form, "float32"))
            if form == "float32":
                cells.append(f"{losses.mean():.3f}")
                continue
            change = 100 * (losses / whole - 1)
            cells.append(f"{change.mean():+.2f} ± {change.std(ddof=1) / len(change) ** 0.5:.2f} %")
        off = np.mean([one[1] for one in results[form, rates[-1]]])
        lines.append(f"| {form} | {' | '.join(cells)} | {f'{100 * off:.2f} %' if off else ''} |")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Train all, and write the table."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.not_built", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="two at least; default 1 2 3")
    parser.add_argument("--iterations", type=int, default=200, help="default 200")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 0.2], metavar="P", help="default 0 0.2")
    parser.add_argument("--out", default=f"{RESULTS}/not_built_{today()}.md", metavar="FILE")
    args = parser.parse_args(argv)
    whole = b"\n".join(content for _, content in stdlib_documents())
    data = torch.from_numpy(np.frombuffer(whole, dtype=np.uint8).astype(np.int64))
    text = data[: len(data) * 9 // 10], data[-100_000:]
    results: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for form in FORMS:
        for p in args.rates:
            results[form, p] = [train(form, p, seed, args.iterations, text) for seed in args.seeds]
            print(f"{form}, {100 * p:g} % lost: {np.mean([one[0] for one in results[form, p]]):.3f}", flush=True)
    lines = [
        "# Forms that were not built",
        "",
        *(f"- {line}" for line in made_with("benchmarks.not_built", argv)),
        f"- {SIZE:,} parameters, {WORKERS} workers of {BATCH} samples each, {args.iterations} iterations, packets of {PACKET} elements",
        f"- Seeds: {' '.join(map(str, args.seeds))}",
        "- Validation loss of float32, and changes against it at the same rate and seed, ± standard errors. Replicas: at the highest rate",
        "",
        *table(results, args.rates),
        "",
    ]
    write_text(Path(args.out), "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    with usage_errors("benchmarks.not_built"):
        main()
