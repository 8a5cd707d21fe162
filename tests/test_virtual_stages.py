"""Virtual stages against an asynchronous pipeline that is run event by event, each stage on its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.async_pipeline.memory import old_weights
from tests.ranks import run_ranks

pytestmark = pytest.mark.shows("virtual stages against stages that run event by event")

STEPS, LAYERS, CLIP = 7, 4, 0.4
LOSS = {"p_param": 0.4, "p_grad": 0.2, "loss_unit": "packet", "packet_bytes": 256}


def config_of(**changes):
    from tests.tiny_gpt import TinyGPT

    base = {"layers": LAYERS, "tied": False, "optimizer": "sgd", "lr": 0.5, "clip_grad": CLIP, "accumulation": 2}
    return TinyGPT(**base | changes)


def virtual_run(config, stages: int, workers: int, **flags):
    from megatron_lossy.lab.virtual import VirtualCluster
    from tests.tiny_gpt import build

    flags = {"async_pipeline": True, "virtual_stages": stages, **flags} if stages else flags
    return build(config, VirtualCluster(LossyConfig(**flags), workers, gapless=True))


def stage_by_name(name: str, stages: int) -> int:
    if "embedding" in name:
        return 0
    found = re.search(r"layers\.(\d+)", name)
    return int(found[1]) // (LAYERS // stages) if found else stages - 1


class Stage(torch.nn.Module):
    """A stage of ``gpt`` that computes with whatever weights it is called with."""

    def __init__(self, gpt, number: int, stages: int) -> None:
        super().__init__()
        length = LAYERS // stages
        self.first, self.last = number == 0, number == stages - 1
        self.layers = torch.nn.ModuleList(gpt.decoder.layers[number * length : (number + 1) * length])
        if self.first:
            self.embedding = gpt.embedding
        if self.last:
            self.norm, self.output = gpt.decoder.final_layernorm, gpt.output_layer

    def forward(self, hidden, batch, micro_batches: int):
        if self.first:
            hidden = self.embedding(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
        length = batch["input_ids"].shape[1]
        causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        for layer in self.layers:
            hidden, _ = layer(hidden, attention_mask=causal)
        if not self.last:
            return hidden
        logits, _ = self.output(self.norm(hidden))
        losses = torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), batch["labels"], reduction="none")
        return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum() / micro_batches


class Pipeline:
    """Endless 1F1B: stage s makes P - 1 - s forward passes more before its first update; then they take turns."""

    def __init__(self, gpt, config, stages: int, workers: int) -> None:
        self.config, self.stages, self.workers = config, stages, workers
        self.modules = [Stage(gpt, number, stages) for number in range(stages)]
        self.weights = [
            {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
            for module in self.modules
        ]
        self.stash: list[dict] = [{} for _ in range(stages)]
        self.versions: list[list[int]] = [[] for _ in range(stages)]
        self.norms: list[list[float]] = [[] for _ in range(stages)]

    def run(self, batches: int) -> None:
        orders = [list(self._order(stage, batches)) for stage in range(self.stages)]
        done = set()
        while any(orders):
            for stage, order in enumerate(orders):
                if order and self._ready(stage, order[0], done):
                    kind, batch = order.pop(0)
                    (self._forward if kind == "F" else self._backward)(stage, batch)
                    done.add((stage, kind, batch))

    def _order(self, stage: int, batches: int) -> Iterator[tuple[str, int]]:
        ahead = self.stages - 1 - stage
        for batch in range(batches + ahead):
            if batch < batches:
                yield "F", batch
            if batch >= ahead:
                yield "B", batch - ahead

    def _ready(self, stage: int, event: tuple[str, int], done: set) -> bool:
        kind, batch = event
        if kind == "F":
            return stage == 0 or (stage - 1, "F", batch) in done
        return stage == self.stages - 1 or (stage + 1, "B", batch) in done

    def _forward(self, stage: int, batch: int) -> None:
        from tests.tiny_gpt import _batch

        weights = {name: weight.clone().requires_grad_() for name, weight in self.weights[stage].items()}
        passes = []
        for worker in range(self.workers):
            for number in range(self.config.accumulation):
                data, index = _batch(self.config, batch, worker, number), worker * self.config.accumulation + number
                hidden = None
                if stage:
                    hidden = self.stash[stage - 1][batch]["passes"][index][1].detach().requires_grad_()
                output = torch.func.functional_call(
                    self.modules[stage], weights, (hidden, data, self.config.accumulation * self.workers)
                )
                passes.append((hidden, output))
        self.stash[stage][batch] = {"weights": weights, "passes": passes}
        self.versions[stage].append(len(self.norms[stage]))

    def _backward(self, stage: int, batch: int) -> None:
        stash = self.stash[stage][batch]
        for number, (_, output) in enumerate(stash["passes"]):
            above = None if stage == self.stages - 1 else self.stash[stage + 1][batch]["passes"][number][0].grad
            output.backward(above)
        if stage + 1 < self.stages:
            del self.stash[stage + 1][batch]
        gradients = {name: weight.grad for name, weight in stash["weights"].items()}
        norm = float(sum(gradient.double().square().sum() for gradient in gradients.values())) ** 0.5
        self.norms[stage].append(norm)
        share = min(1.0, self.config.clip_grad / (norm + 1e-6))
        for name, gradient in gradients.items():
            self.weights[stage][name] = self.weights[stage][name] - self.config.lr * share * gradient


def compare(rank: int, stages: int, workers: int) -> dict:
    config = config_of()
    run = virtual_run(config, stages, workers)
    gpt = run.model[0].module
    pipeline = Pipeline(gpt, config, stages, workers)
    results = [run.step(step) for step in range(STEPS)]
    pipeline.run(STEPS)
    expected = {}
    for weights, module in zip(pipeline.weights, pipeline.modules, strict=True):
        names = {id(parameter): name for name, parameter in gpt.named_parameters()}
        for name, parameter in module.named_parameters():
            expected[names[id(parameter)]] = weights[name].numpy()
    norms = [[result["grad_norm"] for result in results], np.sqrt(np.square(pipeline.norms).sum(0)).tolist()]
    return {
        "weights": run.weights(),
        "expected": expected,
        "versions": pipeline.versions,
        "norms": norms,
        "clipped": [sum(norm > CLIP for norm in own) for own in pipeline.norms],
    }


@pytest.mark.parametrize(("stages", "workers"), [(2, 1), (4, 1), (4, 2)])
def test_the_gradient_is_that_of_explicit_stages(stages, workers):
    """Weights and norms of 7 updates, each stage clipped by its own norm, in float32."""
    [found] = run_ranks(compare, 1, stages, workers)
    assert found["versions"] == [[max(n - (stages - 1 - s), 0) for n in range(STEPS)] for s in range(stages)]
    assert found["weights"].keys() == found["expected"].keys()
    for name, weight in found["weights"].items():
        np.testing.assert_allclose(weight, found["expected"][name], rtol=2e-5, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(*found["norms"], rtol=2e-5)
    assert len(set(found["clipped"])) > 1  # a norm over all stages would clip others


def observe(rank: int, stages: int, workers: int, flags: dict) -> tuple:
    """Replicas by name before each iteration, and what the turns of workers computed with."""
    run = virtual_run(config_of(), stages, workers, **flags)
    before, during = [], []
    forward_backward = run._forward_backward

    def look(*args, **kwargs):
        during[-1].append(run.weights())
        return forward_backward(*args, **kwargs)

    run._forward_backward = look
    for step in range(STEPS):
        replicas = []
        for worker in range(workers):
            with run.cluster.worker(worker, evaluates=True):
                replicas.append(run.weights())
        before.append(replicas)
        during.append([])
        run.step(step)
    return before, during, run.cluster.weight_copies


@pytest.mark.parametrize("flags", [{}, LOSS], ids=["no loss", "lost parameters"])
def test_every_worker_computes_with_its_own_old_replica(flags):
    """Bit for bit, stale units included; evaluation has the newest."""
    stages, workers = 4, 3
    [(before, during, copies)] = run_ranks(observe, 1, stages, workers, flags)
    for step in range(STEPS):
        for worker in range(workers):
            for name, weight in during[step][worker].items():
                version = max(step - (stages - 1 - stage_by_name(name, stages)), 0)
                assert np.array_equal(weight, before[version][worker][name]), (step, worker, name)
    name = "decoder.final_layernorm.weight"
    assert not np.array_equal(before[-1][0][name], before[0][0][name])
    apart = [np.array_equal(*(before[-1][worker][name] for worker in (0, 1))) for name in before[0][0]]
    assert not all(apart) if flags else all(apart)
    sizes = [0] * stages
    for name, weight in before[0][0].items():
        sizes[stage_by_name(name, stages)] += weight.size
    kept = old_weights(LossyConfig(async_pipeline=True, virtual_stages=stages, **flags), sizes, 1, workers)
    assert kept == (workers if flags else 1) * (3 * sizes[0] + 2 * sizes[1] + sizes[2])
    copies_kept = 1 + kept / sum(sizes)  # and with losses what is stale
    assert copies_kept * 0.99 < copies < copies_kept * 1.01 + (2 if flags else 0)


def outcome(rank: int, stages: int, config: dict) -> tuple:
    run = virtual_run(config_of(**config), stages, 2)
    results = [run.step(step) for step in range(4)]
    return [(result["loss"], result["grad_norm"]) for result in results], run.weights()


def test_one_stage_is_synchronous():
    """Bit for bit; two are not."""
    none, one, two = (run_ranks(outcome, 1, stages, {"dtype": "bf16"})[0] for stages in (0, 1, 2))
    assert none[0] == one[0] != two[0]
    assert all(np.array_equal(none[1][name], one[1][name]) for name in none[1])


def refused(rank: int, changes: dict, line: str) -> None:
    with pytest.raises(UsageError) as error:
        virtual_run(dataclasses.replace(config_of(), **changes), 2, 1)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"tied": True}, "--share-embeddings-and-output-weights on: cannot be with --async-pipeline"),
        ({"dtype": "fp16"}, "--fp16: cannot be with --async-pipeline"),
        ({"experts": 2}, "--num-experts: cannot be with --async-pipeline"),
    ],
)
def test_models_that_cannot(changes, line):
    run_ranks(refused, 1, changes, line)
