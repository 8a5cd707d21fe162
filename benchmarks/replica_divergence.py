"""How far full replicas drift apart under errors: simulated with the real errors and optimizers, beside closed forms.

Also how many numbers the mean of equal replicas changes.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from benchmarks.common import RESULTS, made_with, today, write_results
from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.channel.corruption import apply, make_corruption
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.theory import divergence as theory
from megatron_lossy.mechanisms.replicas.synchroniser import Copies, Replica, Synchroniser
from megatron_lossy.transport.peers import LocalPeers

D, ETA, SIGMA = 20_000, 0.1, 0.01


def simulated(
    replicas: int, steps: int, warm: int = 0, momentum: float = 0.0, adam: bool = False, **flags: object
) -> float:
    """Mean over the steps after ``warm`` of |mean - replica|^2, before a synchronisation, where nothing but errors moves."""
    config = LossyConfig(**{"grad_error": f"gaussian:{SIGMA}"} | flags)
    corruption, peers = make_corruption(config), LocalPeers(replicas)
    weights = [torch.zeros(D) for _ in range(replicas)]
    optimizers = [
        torch.optim.Adam([one], lr=ETA, eps=1e-12) if adam else torch.optim.SGD([one], lr=ETA, momentum=momentum)
        for one in weights
    ]

    def moments(k: int) -> list[torch.Tensor]:
        return [value for value in optimizers[k].state[weights[k]].values() if value.numel() == D]

    held = [Replica(lambda k=k: [weights[k]], lambda k=k: moments(k)) for k in range(replicas)]
    synchroniser = Synchroniser(config, [Copies("dense", peers, held)], lambda values: values)
    seen, start = [], torch.zeros(replicas, D)
    for step in range(steps):
        for number, (weight, optimizer) in enumerate(zip(weights, optimizers, strict=True)):
            weight.grad = torch.zeros(D)
            for event in corruption.events(Exchange("grad", Stream(), step), number, [D], 32):
                apply(weight.grad, event)
            optimizer.step()
        moved = torch.stack(weights).double() - (start if adam else 0)
        if step < warm:
            start = torch.stack(weights)
        else:
            seen.append(float((moved - moved.mean(dim=0)).square().sum()) / replicas)
        synchroniser.finished()
    return seen[-1] if not config.synchronises else float(np.mean(seen))


def changed(replicas: int, values: torch.Tensor) -> float:
    """The share of float32 numbers that are not the mean of so many copies of them."""
    copies = [values.clone() for _ in range(replicas)]
    LocalPeers(replicas).sum_(copies).wait()
    return float((copies[0].div_(replicas) != values).double().mean())


def divergences() -> list[str]:
    """Rows of a table: simulation, ours, the paper's."""
    rows = []

    def row(what: str, found: float, ours: float, paper: float | None = None) -> None:
        printed = "" if paper is None else f"{paper:.3g}"
        rows.append(f"| {what} | {found:.3g} | {ours:.3g} | {found / ours:.3f} | {printed} |")

    unit = D * (SIGMA * ETA) ** 2
    for replicas in (2, 4, 8, 32):
        found = simulated(replicas, 30) / unit / 30
        row(f"SGD, N = {replicas}, a step", found, theory.share(replicas), theory.divergence_paper(replicas, 1, [1]))
    rates = np.ones(400)
    found = simulated(4, 400, momentum=0.9) / unit / 400
    row("momentum 0.9, N = 4, a step of 400", found, theory.divergence(4, 1, rates, 1, 0.9) / 400, 5 / 4)
    for interval in (1, 10, 100):
        for state in ("params", "all"):
            flags = {"param_sync_interval": interval, "param_sync_state": state, "param_sync_always": True}
            warm = -(-60 // interval) * interval
            found = simulated(4, warm + max(interval, 40), warm, 0.9, **flags) / unit
            ours = theory.over_interval(4, 1, 1, interval, 1, 0.9, state == "all")
            row(f"momentum 0.9, N = 4, H = {interval}, {state} averaged", found, ours)
    for std in (0.01, 1.0, 100.0):
        found = simulated(4, 300, 200, adam=True, grad_error=f"gaussian:{std}") / (D * ETA**2) / 100
        # Of a hundred steps of a decaying mean that was warm before.
        ours = theory.after_synchronisation(4, 1 - 0.9, 1, 100, 1, 0.9) / 100
        row(f"Adam, N = 4, errors of {std:g} alone, a step of 100", found, ours)
    return rows


def main(argv: list[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser("python -m benchmarks.replica_divergence", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    values = torch.randn(10**6, generator=torch.Generator().manual_seed(0))
    table = [
        "| errors of standard deviation sigma, learning rate eta | simulated | closed form | ratio | as the paper prints it |",
        "| --- | --- | --- | --- | --- |",
        *divergences(),
        "",
        "Mean of |mean - replica|² per parameter, in units of (sigma eta)² (SGD) or eta² (Adam).",
        "",
        "| equal replicas | share of float32 numbers that their mean changes |",
        "| --- | --- |",
        *(f"| {n} | {100 * changed(n, values):.0f} % |" for n in (2, 3, 4, 5, 6, 8, 32)),
    ]
    name = f"replica_divergence_{today()}"
    about = "\n".join(f"- {line}" for line in made_with("benchmarks.replica_divergence", argv or []))
    text = "\n".join(table) + "\n\n" + about + "\n"
    print(text)
    write_results(args.out, name, md=text)


if __name__ == "__main__":
    main()
