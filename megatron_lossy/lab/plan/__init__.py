"""``python -m megatron_lossy plan``: from a link and a model to the flags of a run (docs/choosing.md).

It predicts the time of an iteration of each way to train over the link, leaves out what the launcher would refuse, and
recommends one.
"""

from __future__ import annotations

import json
import shlex
import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...base.errors import ArgumentParser, cannot, refuse
from ...base.files import check_folder, writing
from ..launch.options import DEVICES, GIB
from ..launch.recipe import Recipe, read_recipe
from ..train.metrics import METRICS_FILE
from .advice import LONGER, Advice, advise, shaped
from .link import COUNT, LOSS, SECONDS, Link, quantity, read_link
from .ways import SPARE, cost, measured, use

_CONFIG = "llama2_7b/cuda_dp64"
_DAY = 86400


def main(arguments: Sequence[str]) -> None:
    """Print the ways to train over the link of the command line, the recommended one first."""
    given, advice = planned(arguments)
    print("\n".join(report(advice, given.gpus_cost, given.egress_cost)))
    if given.write is not None:
        check_folder("--write", Path(given.write).parent)
        with writing("--write", given.write):
            advice.write(given.write, shlex.join(["python", "-m", "megatron_lossy", "plan", *arguments]))
        print(f"{given.write}: for python -m megatron_lossy.launch --config {given.write} --program train …")


def planned(arguments: Sequence[str]) -> tuple[Namespace, Advice]:
    """Return the flags of a command line, and the advice for them. Raise :class:`UsageError`."""
    parser = ArgumentParser(
        "python -m megatron_lossy plan",
        description="Which way to train over a link between sites, how long it takes, and what to set (docs/choosing.md).",
        allow_abbrev=False,
    )
    link = parser.add_argument_group("the link between sites").add_argument
    link("--link", metavar="FILE", help="what doctor --link has measured; or give --mbit, --rtt and --loss")
    link("--mbit", type=float, help="rate each way, Mbit/s, out of a site and into it")
    link("--rtt", type=float, metavar="MS", help="round trip, ms")
    link("--loss", metavar="P", help="share of packets lost, such as 0.5%% or 0.005; default 0")
    run = parser.add_argument_group("the run").add_argument
    run("--config", default=_CONFIG, metavar="FILE.yaml", help=f"the run, for the launcher; default {_CONFIG}")
    run("--parameters", metavar="N", help="such as 7B: a LLaMA of about that size in the place of the file's model")
    run("--step", metavar="TIME", help="of an iteration on one site, such as 13s or 180ms; or give --metrics")
    run("--metrics", metavar="FILE", help=f"{METRICS_FILE} of a run on one site, for the time of an iteration")
    run("--sites", type=int, default=2, metavar="M", help="default 2")
    run("--ranks-per-site", type=int, default=8, metavar="R", help="accelerators of a site; default 8")
    run("--tp", type=int, metavar="T", help="tensor-parallel ranks; default as in the file")
    run("--pp", type=int, metavar="P", help="pipeline stages; default as in the file")
    run("--device", choices=tuple(DEVICES), help="accelerator; default as in the file")
    run("--tokens", metavar="N", help="of the whole run, such as 140B; default as in the file")
    run("--gpus-cost", type=float, default=0.0, metavar="PRICE", help="of an accelerator and hour: adds a column")
    run("--egress-cost", type=float, default=0.0, metavar="PRICE", help="of a GB that leaves a site: adds to it")
    run("--write", metavar="FILE", help="write the recommended run, for --config of megatron_lossy.launch")
    given = parser.parse_args(arguments)
    tokens = None if given.tokens is None else quantity("--tokens", given.tokens, COUNT, 1)
    return given, advise(_link(given), _recipe(given), _step(given), given.sites, tokens)


def _link(given: Namespace) -> Link:
    described = {flag: getattr(given, flag) for flag in ("mbit", "rtt", "loss")}
    if given.link is not None:
        for flag, value in described.items():
            if value is not None:
                raise refuse(f"--{flag}", value, "is in the file of --link; omit one")
        return read_link(given.link)
    for flag in ("mbit", "rtt"):
        if described[flag] is None:
            raise refuse(f"--{flag}", "(none)", "needs a value, or --link FILE of doctor --link")
    return Link(given.mbit, given.rtt / 1e3, quantity("--loss", given.loss or "0", LOSS))


def _step(given: Namespace) -> tuple[float, float, float]:
    """Return seconds of an iteration without the link: low, median and high."""
    if (given.step is None) == (given.metrics is None):
        raise refuse("--step", given.step or "(none)", "needs a value, or else --metrics FILE of a run on one site")
    if given.step is not None:
        return (quantity("--step", given.step, SECONDS, 1e-6),) * 3
    try:
        records = map(json.loads, Path(given.metrics).read_text(encoding="utf-8").splitlines())
        times = [record["seconds"] for record in records if record["kind"] == "train"][1:]  # the first begins
        low, median, high = statistics.quantiles(times, n=4)
    except OSError as error:
        raise cannot("--metrics", given.metrics, "read", error) from None
    except (ValueError, KeyError, TypeError):
        raise refuse("--metrics", given.metrics, "must have three records of training at least") from None
    return low, median, high


def _recipe(given: Namespace) -> Recipe:
    """Return the run of the command line. Raise :class:`UsageError`."""
    recipe, ranks = read_recipe(given.config), given.ranks_per_site
    if "virtual-workers" in recipe.settings:
        raise refuse("--config", given.config, "has virtual-workers; a plan is for real ranks")
    inner = {"tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size"}
    sizes = {name: recipe.settings.get(name, 1) for name in inner.values()}
    sizes |= {name: getattr(given, flag) for flag, name in inner.items() if getattr(given, flag) is not None}
    tensor, pipeline = sizes.values()
    for flag, value in (("sites", given.sites), ("ranks-per-site", ranks), ("tp", tensor), ("pp", pipeline)):
        least = 2 if flag == "sites" else 1
        if value < least:
            raise refuse(f"--{flag}", value, f"must be at least {least}")
    data, rest = divmod(ranks, tensor * pipeline)
    if rest:
        raise refuse("--ranks-per-site", ranks, f"must be a multiple of --tp times --pp, {tensor * pipeline}")
    node = min(recipe.launch.get("accelerators-per-node", 8), ranks)
    launch = {
        "accelerators": given.sites * ranks,
        "accelerators-per-node": next(number for number in range(node, 0, -1) if ranks % number == 0),
        "device": given.device or recipe.launch.get("device", "cpu"),
    }
    recipe = replace(recipe, launch=recipe.launch | launch)
    if given.parameters is not None:
        recipe = shaped(recipe, quantity("--parameters", given.parameters, COUNT, 1), tensor, pipeline)
    if pipeline > 1:
        sizes["use-tp-pp-dp-mapping"] = True  # so that a site is a block of ranks
    least = recipe.settings.get("micro-batch-size", 1) * data * given.sites
    sizes["global-batch-size"] = -(-recipe.settings.get("global-batch-size", least) // least) * least
    return replace(recipe, settings=recipe.settings | sizes)


def report(advice: Advice, gpus_cost: float = 0.0, egress_cost: float = 0.0) -> list[str]:
    """Return the text: link and model, a table of ways, reasons, warnings, the flags."""
    link, job, best = advice.link, advice.job, advice.options[0].found
    layers, hidden = (advice.recipe.settings.get(name) for name in ("num-layers", "hidden-size"))
    batch = f"a batch of {advice.recipe.settings.get('global-batch-size')}"
    lost = f"{1e3 * link.rtt:.3g} ms, {100 * link.loss:.3g} % lost"
    return [
        f"link   {link.mbit:g} Mbit/s, {lost}; {100 * SPARE:.0f} % are left to others",
        f"model  {job.parameters / 1e9:.3g} B parameters, {layers} layers of {hidden}, on {job.sites} sites of {job.ranks} ranks",
        f"step   {seconds(job.step[1])} on one site, {batch}: {advice.iteration_tokens / 1e6:.3g} M of {advice.tokens / 1e9:.3g} G tokens",
        "",
        *_table(advice, gpus_cost, egress_cost),
        "",
        f"recommended: {best.name}",
        *_recommendation(advice),
        f"flags: {advice.options[0].flags}",
        *(f"not {name}: {why}" for name, why in advice.refused.items()),
    ]


def _table(advice: Advice, gpus_cost: float, egress_cost: float) -> list[str]:
    job, priced = advice.job, bool(gpus_cost or egress_cost)
    rows = [["way", "s an iteration", "hidden", "GB a day each way", "GiB a device", "days", "validation loss (95 %)"]]
    rows[0][6:6] = ["cost"] * priced
    iterations = advice.tokens / advice.iteration_tokens
    for option in advice.options:
        found = option.found
        low, median, high = map(_number, found.seconds)
        hours, gigabytes = iterations * found.seconds[1] / 3600, found.sent / 1e9
        price = job.sites * (job.ranks * hours * gpus_cost + iterations * gigabytes * egress_cost)
        text, known = cost(found, advice.link)
        row = [
            found.name,
            median if low == high else f"{median} ({low} to {high})",
            seconds(found.hidden) if found.hidden else "-",
            _number(gigabytes * _DAY / found.seconds[1]),
            _number(option.memory / GIB),
            _number(hours / 24),
            *[_number(price)] * priced,
            text if known else f"not measured; nearest {text}",
        ]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _recommendation(advice: Advice) -> list[str]:
    """Return the paragraph about the recommended way, and warnings."""
    job, best, link, step = advice.job, advice.options[0].found, advice.link, advice.job.step[1]
    largest = max(row["parameters"] for row in measured()["costs"])
    fits = best.seconds[1] <= (1 + LONGER) * step
    text = f"the first that makes an iteration at most {LONGER:.0%} longer" if fits else "none keeps it near its length"
    text = f"Ways are listed from what is nearest to training on one site; {text}. "
    flats = [option.found.seconds[1] - step for option in advice.options[1:] if option.found.way.method == "gradients"]
    if flats:
        text += f"Gradients of all ranks would add {seconds(min(flats))}, {min(flats) / step:.2g} times the step. "
    if best.hidden:
        text += f"An exchange takes {seconds(best.hidden)}, while training goes on for {seconds(best.delay * step)}."
    else:
        text += f"This way adds {seconds(best.seconds[1] - step)}."
    nearest, known = cost(best, link)
    transport, large = best.way.transport, job.parameters > 10 * largest
    warnings = {
        f"nobody has measured what this costs in validation loss; the nearest that was: {nearest}": not known,
        f"nobody has measured what {transport} takes of such a link": transport and use(transport, link) is None,
        f"losses come {link.burst:.1f} in a row; {transport} was measured with single ones": link.burst > 2,
        f"costs in validation loss are of at most {largest / 1e6:.2g} million parameters": large,
    }
    return [text, *(f"warning: {warning}" for warning, due in warnings.items() if due)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def seconds(time: float) -> str:
    """Return a time in words."""
    if time < 1:
        return f"{1e3 * time:.3g} ms"
    return f"{time:.3g} s" if time < 120 else f"{time / 60:.3g} min" if time < 7200 else f"{time / 3600:.3g} h"
