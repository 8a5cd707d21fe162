"""``python -m megatron_lossy.lab lag``: the effect of lost parameters on the stability of training, with advice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base.errors import ArgumentParser, refuse
from ..theory import Lag, stability_limit

BETAS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.0)
_EPSILON = 1e-9


def main(arguments: Sequence[str]) -> None:
    """Print the lag at the settings of the command line, a table over the first moment's decay, and advice."""
    late = "How late replicas are if a share of parameters is lost, which learning rates stay stable"
    parser = ArgumentParser("megatron_lossy.lab lag", description=f"{late}, and what to set (docs/lag.md).")
    parser.add_argument("--p", type=float, required=True, help="loss rate of parameters, as --p-param")
    parser.add_argument("--beta1", type=float, default=0.9, help="decay of Adam's first moment; default 0.9")
    bursts = "losses come in bursts of this mean length, in updates"
    parser.add_argument("--mean-burst", type=float, metavar="B", help=bursts)
    given = parser.parse_args(arguments)
    if not 0 <= given.p < 1:
        raise refuse("--p", given.p, "must be in [0, 1)")
    if not 0 <= given.beta1 < 1:
        raise refuse("--beta1", given.beta1, "must be in [0, 1)")
    if given.mean_burst is not None and not given.mean_burst >= max(1, given.p / (1 - given.p)) - _EPSILON:
        why = f"must be at least 1 and p/(1-p) = {given.p / (1 - given.p):.3g}"
        raise refuse("--mean-burst", given.mean_burst, why)
    lag, beta1, burst = Lag.of(given.p, given.mean_burst), given.beta1, given.mean_burst
    how = "independently" if burst is None else f"in bursts of {burst:g} updates"
    lines = [
        f"{100 * given.p:g} % of parameters lost, {how}: replicas are {lag.mean:.3g} updates late on average.",
        "",
        "Largest stable (learning rate x curvature) of Adam:",
        "",
        "beta1    no loss      plain  compensated",
    ]
    limits = {}
    for beta in sorted({*BETAS, beta1}, reverse=True):
        limits[beta] = stability_limit(beta), stability_limit(beta, lag), stability_limit(beta, lag, lag.lead)
        lines.append("{:5g} {:10.2f} {:10.2f} {:12.2f}".format(beta, *limits[beta]) + "   <- yours" * (beta == beta1))
    none, plain, sent = limits[beta1]
    if plain >= none:
        print("\n".join([*lines, "", f"At beta1 {beta1:g} this loss makes nothing less stable."]))
        return
    best = max(np.arange(0, beta1, 0.05), key=lambda beta: stability_limit(beta, lag))
    lead = f"{lag.lead.c:.3g}" + (f", r = {lag.lead.r:.3g}" if lag.lead.r else "")
    lines += [
        "",
        f"At beta1 {beta1:g} this loss leaves 1/{none / plain:.1f} of the stable learning rates. Set one or more:",
        f"  --param-send compensated   a lead of {lead}, found by itself; the limit is {sent:.2f} again",
        f"  --adam-beta1 {best:.2f}          less momentum; the limit without a lead is {stability_limit(best, lag):.2f}",
        "  --loss-unit packet         where the network loses packets: small units average the age",
        "  --loss-schedule 0:0,K:P    no loss in the first third of training, say",
    ]
    print("\n".join(lines))
