"""Advice: every way of :mod:`.ways` as a run of the launcher, checked as ``launch --dry-run`` checks it, and one of them first."""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from ...base.errors import UsageError, note_origins, refuse
from ...base.files import write_text
from ...base.flags import of_flags
from ...config import LossyConfig, given
from ..data import padded_vocab_size
from ..launch.checks import check_memory, check_training
from ..launch.command import check_shape
from ..launch.memory import parameters
from ..launch.plan import Plan, make_plan
from ..launch.recipe import Recipe, flag_arguments
from .link import Link
from .ways import PACKET_MORE, SPARE, WAYS, Job, Prediction, Way, order, predict

#: Gradients are chosen if an iteration is at most so much longer than without the link: the cost of islands is known for
#: tiny models only.
LONGER = 1 / 3


@dataclass(frozen=True)
class Option:
    """A way that the launcher takes. ``settings``: loss flags by name. ``memory``: bytes on a device, computed."""

    found: Prediction
    settings: Mapping[str, Any]
    memory: float

    @property
    def flags(self) -> str:
        """The flags, for a shell."""
        return shlex.join(flag_arguments(self.settings, "plan"))


@dataclass(frozen=True)
class Advice:
    """``options``: the recommended one first. ``refused``: the others by name, with the launcher's reason."""

    link: Link
    job: Job
    recipe: Recipe
    iteration_tokens: float
    tokens: float
    options: Sequence[Option]
    refused: Mapping[str, str]

    def write(self, file: str, command: str) -> None:
        """Write the recommended run to ``file``, for ``launch --config``."""
        best = self.options[0]
        head = f"# {best.found.name}: {best.found.seconds[1]:.3g} s an iteration, predicted. Made by\n#   {command}\n"
        write_text(file, head + _text(replace(self.recipe, settings=self.recipe.settings | best.settings)))


def advise(link: Link, recipe: Recipe, step: tuple[float, float, float], sites: int, tokens: float | None) -> Advice:
    """Predict and check all ways over ``link`` of the run that ``recipe`` describes. Raise :class:`UsageError`.

    ``step``: seconds of an iteration without the link: low, median, high. ``tokens``: of the whole run, if not the recipe's.
    """
    alone = _planned(recipe)
    alone.train.check_world(alone.ranks)
    check_shape(alone)
    data = alone.train.data_parallel_size(alone.ranks)
    size = parameters(alone.train, alone.layout.vocab_size)
    job = Job(size, 2 if alone.train.bf16 else 4, step, sites, alone.ranks // sites, data // sites)
    own = given(alone.lossy)
    options, refused = [], {}
    for way in WAYS:
        found = predict(way, link, job)
        settings = dict(settings_of(found, link, job, recipe))
        try:
            lossy = of_flags(LossyConfig, own | {name.replace("-", "_"): value for name, value in settings.items()})
            plan = replace(alone, lossy=lossy)
            plan.train.check_world(plan.ranks)
            check_training(plan)
            options.append(Option(found, settings, check_memory(plan).total))
        except UsageError as error:
            refused[found.name] = str(error)
    if not options:
        raise UsageError(next(iter(refused.values())))
    options.sort(key=lambda option: order(option.found))
    best = recommended(options, job)
    options.sort(key=lambda option: option is not best)
    each = alone.train.tokens / alone.train.train_iters
    return Advice(link, job, recipe, each, tokens or alone.train.tokens, options, refused)


def recommended(options: Sequence[Option], job: Job) -> Option:
    """Return the cheapest of ``options`` with an iteration at most :data:`LONGER` longer; else the fastest.

    Of ways that cost the same the shortest iteration counts; that of islands is always the same.
    """
    fine = [option for option in options if option.found.seconds[1] <= (1 + LONGER) * job.step[1]]
    best = fine[0] if fine else min(options, key=lambda option: option.found.seconds[1])
    if best.found.way.method == "islands":
        return best
    same = [option for option in fine if option.found.way.rank == best.found.way.rank]
    return min([*same, best], key=lambda option: option.found.seconds[1])


def settings_of(found: Prediction, link: Link, job: Job, recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a way, by name."""
    way: Way = found.way
    if way.method == "sites":
        yield "sites", job.sites
    if way.values == "int8" and way.method == "sites":
        yield from (("grad-wire", "int8"), ("param-wire", "int8"))
    if way.method in ("islands", "diloco", "nothing"):
        methods = {"islands": "parameters", "nothing": "none"}
        yield from (("islands", job.sites), ("sync-method", methods.get(way.method, way.method)))
        if recipe.settings.get("drift-interval"):
            yield "drift-interval", 0
    if way.method == "islands":
        yield from (("sync-delay", found.delay), ("sync-dtype", way.values), ("save-replicas", True))
        if found.parts > 1:
            yield from (("sync-fraction", fraction(found.parts)), ("sync-block", 128))
        if found.delay >= found.parts:
            yield "delay-correction", "smith"
    if way.method == "diloco":
        yield "save-replicas", True
    if found.interval > 1:
        yield "sync-interval", found.interval
    if way.transport is not None:
        yield "transport", way.transport
    if way.transport == "stream":
        yield "udp-rate", "bbr"  # as measured
    if way.transport == "udp":
        senders = 1 if way.method == "sites" else job.ranks
        if link.mtu is not None and link.mtu < 1500:
            yield "packet-bytes", int(link.mtu - PACKET_MORE - 20) // 64 * 64  # over IPv6, too
        yield "udp-rate", f"{max(1.0, 1e3 * link.mbit * (1 - SPARE) / senders):.0f}kbit"


def fraction(n: int) -> float:
    """Return the ``--sync-fraction`` of one part in ``n``, rounded up where that leaves as many parts."""
    return math.ceil(1e9 / n) / 1e9 if n < 30_000 else 1 / n


def shaped(recipe: Recipe, number: float, tensor: int, pipeline: int) -> Recipe:
    """Return ``recipe`` with the layers of a LLaMA of about ``number`` parameters, unless it has as many within 1 %.

    Raise :class:`UsageError`.
    """
    alone = _planned(recipe)
    vocabulary = alone.layout.vocab_size
    if abs(parameters(alone.train, vocabulary) / number - 1) < 0.01:
        return recipe
    head = 128 if number >= 1e8 else 32
    rows = 2 * padded_vocab_size(vocabulary, alone.train.make_vocab_size_divisible_by, tensor)
    best = (math.inf, 0, 0, 0)
    for hidden in range(head * tensor, 32769, head * tensor):
        ffn = math.ceil(8 / 3 * hidden / (64 * tensor)) * 64 * tensor
        layer = 4 * hidden**2 + 3 * hidden * ffn + 2 * hidden
        layers = pipeline * max(1, round((number - rows * hidden) / layer / pipeline))
        off = abs(math.log((layers * layer + rows * hidden) / number))
        best = min(best, (10 * off + abs(math.log(hidden / layers / 128)), hidden, layers, ffn))
    score, hidden, layers, ffn = best
    if not score < 8:
        raise refuse("--parameters", f"{number:g}", "no LLaMA is about so large; give --config, with its layers")
    heads = {"num-attention-heads": hidden // head, "num-query-groups": hidden // head}
    shape = {"num-layers": layers, "hidden-size": hidden, "ffn-hidden-size": ffn, **heads}
    return replace(recipe, settings=recipe.settings | shape)


def _planned(recipe: Recipe) -> Plan:
    """Return the launcher's plan of ``recipe``. Raise :class:`UsageError`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "plan.yaml")
        file.write_text(_text(recipe), encoding="utf-8")
        more = [] if "data" in recipe.settings or "data-path" in recipe.settings else ["--data", "stdlib"]
        try:
            return make_plan(["--config", str(file), "--program", "train", "--out", folder, "--dry-run", *more])
        finally:
            note_origins({})  # no file of the user's


def _text(recipe: Recipe) -> str:
    content = {**recipe.settings, "launch": recipe.launch, "megatron": recipe.megatron}
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)
