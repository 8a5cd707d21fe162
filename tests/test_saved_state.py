"""A run saves all that it needs: every entry of every state is taken away in turn (``saved_state.py``)."""

import ast
import copy
import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual.in_memory import LossyWorkers
from megatron_lossy.mechanisms.lead.compensated import Compensated
from megatron_lossy.mechanisms.replicas import average
from megatron_lossy.transport import BucketSpec
from megatron_lossy.transport.peers import LocalPeers
from tests.churning_rows import ChurningRows
from tests.full_replicas import FullReplicas
from tests.saved_state import unmissed, walk
from tests.test_transport_in_memory import SHARDS, Rank
from tests.vectors import rounds_of

pytestmark = pytest.mark.shows("no entry of a saved state can be taken away unnoticed")

PACKAGE = Path(__file__).parents[1] / "megatron_lossy"
CPU = torch.device("cpu")

#: Every class with a state, and the walk below, or the test, that has it.
WALKED = {
    "transport.group.LossyGroup": "test_groups",
    "recovery.base.Rule": "test_groups",
    "mechanisms.priority.protected.ProtectedRule": "test_groups",
    "mechanisms.lead.compensated.Compensated": "test_groups",
    "mechanisms.lead.lag.ReceiverCounts": "test_groups",
    "recovery.feedback.ErrorFeedback": "test_groups",
    "recovery.previous.Previous": "test_groups",
    "mechanisms.replicas.synchroniser.Synchroniser": "test_full_replicas",
    "mechanisms.replicas.average.Piece": "test_full_replicas",
    "mechanisms.replicas.full_replicas.FullReplicas": "test_replicas_train.py, saved and resumed",
    "mechanisms.replicas.monitor.ReplicaMonitor": "test_replicas_train.py, saved and resumed",
    "mechanisms.islands.rounds.Rounds": "test_islands",
    "mechanisms.islands.rounds.MemberRounds": "test_islands_that_come_and_go",
    "lab.virtual.island_churn.Presence": "test_islands_that_come_and_go",
    "lab.virtual.island_churn.Churn": "test_islands_that_come_and_go",
    "mechanisms.islands.rules.Rule": "test_islands",
    "mechanisms.islands.mean.Rest": "test_islands",
    "lab.virtual.versions.Versions": "test_virtual_train.py, saved and resumed",
    "lab.async_pipeline.virtual.Stages": "test_async_pipeline_train.py, saved and resumed",
    "run.monitor.observer.Observer": "test_train.py, saved and resumed",
    "run.monitor.window.Window": "test_train.py, saved and resumed",
    "run.monitor.exchanges.ExchangeMonitor": "test_train.py, saved and resumed",
    "mechanisms.compression.monitor.WireMonitor": "test_compression.py, saved and resumed",
    "mechanisms.islands.monitor.IslandMonitor": "test_islands_train.py, saved and resumed",
    "mechanisms.islands.elastic.ElasticIslands": "test_islands_apart.py, all die",
    "mechanisms.islands.ranks.ExchangingRank": "test_islands_ranks.py, saved and resumed",
    "mechanisms.islands.fsdp._ShardsOfFSDP": "test_pytorch_islands.py, saved and resumed",
    "run.mechanism.Part": "no state of its own: test_islands_ranks.py",
    "lab.async_pipeline.stage.Stash": "test_async_pipeline.py, saved and resumed",
    "lab.async_pipeline.workers.StageWorkers": "test_async_pipeline.py, saved and resumed",
    "pytorch.base.LossyRun": "test_pytorch_run.py, test_pytorch_ddp.py, saved and resumed",
    "pytorch.lightning.LossyCallback": "test_pytorch_doors.py, saved and resumed",
    "pytorch.torchtitan.LossyTrainer": "test_pytorch_doors.py, saved and resumed",
}


def test_every_class_with_a_state_is_walked():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                found |= {f"{module}.{node.name}"} if "state_dict" in methods else set()
    assert found == set(WALKED)


SIZE = 3
PACKETS = {"loss_unit": "packet", "packet_bytes": 16}
BURSTS = {"loss_model": ("gilbert-elliott:3",)}
LEAD = {"param_send": "compensated"}
FEEDBACK = {"grad_recovery": "error-feedback"}
CODED = {"loss_unit": "packet", "packet_bytes": 40, "wire_block": 32, "grad_wire": "int4", "param_wire": "int8"}
GROUPS = {
    **{rule: PACKETS | {"grad_recovery": rule} for rule in ("renormalize", "zero", "previous")},
    "previous of shards": {"grad_recovery": "previous", "lossy_self": True},
    "error-feedback": PACKETS | FEEDBACK | {"grad_priority": "none"},
    "error-feedback, bursts": PACKETS | BURSTS | FEEDBACK | {"grad_priority": "packet-mean:0.1"},
    "codes": CODED | {"grad_recovery": "previous"},
    "codes, error-feedback, lead": CODED | LEAD | FEEDBACK,
    "lead": LEAD,
    "lead, bursts": PACKETS | BURSTS | LEAD | FEEDBACK,
    "lead, schedule": BURSTS | LEAD | {"loss_schedule": ("0:0.4,4:0,5:0.2",), "grad_recovery": "previous"},
    "lead, given": LEAD | {"param_send": "compensated:0.5,0.25", "grad_recovery": "previous"},
    "lead, counted": PACKETS | LEAD | {"loss_model": ("trace",)},
}


class Groups:
    """Workers that descend with the public collectives; a user's own loop saves its own state besides."""

    def __init__(self, config):
        self.lossy = LossyWorkers(config, [BucketSpec(shard) for shard in SHARDS], SIZE)
        self.ranks = [Rank(rank, SIZE, torch.float32) for rank in range(SIZE)]
        self.step = 0

    def run(self, steps):
        history = []
        for _ in range(steps):
            self.one()
            rules = [rule for group in self.lossy.groups for rule in group.grads]
            told = [vars(rule.priority.told) for rule in rules if hasattr(rule, "priority")]
            sent = [rule for group in self.lossy.groups for rule in group.params]
            leads = [rule.lag.lead(self.step) if isinstance(rule, Compensated) else None for rule in sent]
            history.append([[one.copy() for one in self.replicas()], copy.deepcopy(told), leads])
        return history

    def one(self):
        for bucket in range(len(SHARDS)):
            pieces = [one.gradients(bucket) for one in self.ranks]
            self.lossy.reduce_scatter(bucket, [one.grads[bucket] for one in self.ranks], pieces, self.step)
        for bucket in range(len(SHARDS)):
            for one in self.ranks:
                one.update(bucket)
            replicas, owned = zip(*((one.replicas[bucket], one.owned[bucket]) for one in self.ranks), strict=True)
            self.lossy.all_gather(bucket, replicas, owned, self.step)
        self.step += 1

    def replicas(self):
        return [replica.numpy() for one in self.ranks for replica in one.replicas]

    def state(self):
        return copy.deepcopy([group.state_dict() for group in self.lossy.groups])

    def resume(self, other, state):
        """Go on from where ``other`` is, with ``state``."""
        self.step = other.step
        for mine, theirs in zip(self.ranks, other.ranks, strict=True):
            for replica, value in zip(mine.replicas, theirs.replicas, strict=True):
                replica.copy_(value)
            mine.random.set_state(theirs.random.get_state())
        for group, one in zip(self.lossy.groups, state, strict=True):
            group.load_state_dict(one, CPU)


def config_of(flags, folder):
    config = {"p_grad": 0.4, "p_param": 0.4} | flags
    if config.get("loss_model") == ("trace",) or "loss_schedule" in config:
        del config["p_grad"], config["p_param"]
    if config.get("loss_model") == ("trace",):
        config["trace"] = trace(folder, SIZE, 13 + 2)
    return LossyConfig(**config)


def trace(folder, size, units):
    """Write a trace of 16 steps; return its path. Losses often repeat, so that the kept part of a lead counts."""
    random, path = np.random.default_rng(3), str(folder / "trace.npz")
    arrived = random.random((16, size, size, units)) > 0.4
    for step in range(1, len(arrived)):
        arrived[step] = np.where(random.random(arrived[step].shape) < 0.7, arrived[step - 1], arrived[step])
    np.savez(path, grad=arrived, param=arrived)
    return path


def walk_of(make, steps, more):
    """Return the results of ``more`` steps of ``make()``, saved after ``steps``."""
    first = make()
    fresh = first.state()
    first.run(steps)
    state, here = first.state(), copy.deepcopy(first)
    expected = first.run(more)

    def goes_on(changed):
        if changed is None:
            return expected
        again = make()
        again.resume(here, changed)
        return again.run(more)

    return walk(state, fresh, goes_on)


def walks_of(cases, when, more):
    """By case and steps before the save, what is missed; in any case a run continues. ``cases``: by name, how one is made."""
    results = {}
    for name, make in cases.items():
        for steps in when:
            continues, results[f"{name}, {steps}"] = walk_of(make, steps, more)
            assert continues, (name, steps)
    return results


def test_groups(tmp_path):
    """In any case a run continues bit for bit, and the states of rules, of leads and of what was counted are all missed."""
    made = {name: partial(Groups, config_of(flags, tmp_path)) for name, flags in GROUPS.items()}
    assert not unmissed(
        walks_of(made, (4, 5), 4),
        {
            "*/grad/*/kept": "what the next step loses, where it is known which one that is: of runs",
            "*/param/*/step": "of an update that is sent again, which loops on the public collectives do not",
            "*/counted/*/steps": "the same",
            "*/counted/*/coming": "these loops do not wait for the counts of others",
        },
    )


ERRORS = {"grad_error": "gaussian:0.5rms"}
REPLICAS = {
    "mean": ERRORS | {"param_sync_interval": 3},
    "overlapped": ERRORS
    | {"param_sync_interval": 2, "param_sync_overlap": True, "param_sync_state": "all", "optimizer": "adam"},
    "in place": ERRORS
    | {"param_sync_interval": 2, "param_sync_overlap": True, "param_sync_rule": "divergence", "aside": True},
    "by divergence": ERRORS | {"param_sync_interval": 2, "param_sync_rule": "divergence"},
    "first": ERRORS | {"param_sync_interval": 2, "param_sync_overlap": True, "param_sync_state": "params:first"},
    "one is not finite": ERRORS | {"param_sync_interval": 2, "param_sync_overlap": True, "added": torch.nan},
    "one is wrong": {"param_sync_interval": 2, "param_sync_overlap": True, "added": 3.0},
}


class Replicas(FullReplicas):
    """Their parameters and optimizers are saved by others."""

    def __init__(self, added=0.0, **flags):
        super().__init__(LocalPeers(3), **flags)
        self._added = added  # to a weight of the first one, before a synchronisation

    def run(self, steps):
        history = []
        for _ in range(steps):
            if self.iteration == 3:
                self.parameters[0][0][0] += self._added
            self.step()
            told = [vars(one) for one in self.synchroniser.take()]
            history.append([self.weights() if not self.synchroniser.moves else None, told])
        return history

    def state(self):
        return copy.deepcopy(self.synchroniser.state_dict())

    def resume(self, other, state):
        self.iteration = other.iteration
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            for one, value in zip(mine, theirs, strict=True):
                one.copy_(value)
        for mine, theirs in zip(self.optimizers, other.optimizers, strict=True):
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
        self.synchroniser.load_state_dict(state)


def test_full_replicas(monkeypatch):
    monkeypatch.setattr(average, "ALONE", 2**10)  # from which tensors are averaged in place
    assert not unmissed(
        walks_of({name: partial(Replicas, **flags) for name, flags in REPLICAS.items()}, (4, 5), 4),
        {
            "flight/parts/*/source": "what a replica was copied from is not asked again when the copy has arrived",
            "flight/parts/*/moments/*/before": "only the divergence of parameters is measured",
        },
    )


LATE = {"islands": 3, "sync_method": "parameters", "sync_interval": 2, "sync_delay": 5, "sync_fraction": 0.5}
ISLANDS = {
    "mixing": LATE,
    "mixing, bf16": LATE | {"sync_dtype": "bf16"},
    "int8": LATE | {"sync_dtype": "int8", "wire_block": 32},
    "ema": LATE | {"delay_correction": "ema"},
    "smith": LATE | {"delay_correction": "smith:0.5", "sync_subset": "partition"},
    "lost": LATE | {"p_sync": 0.3, "delay_correction": "smith:0.5"},
    "diloco": {"islands": 3, "sync_method": "diloco", "sync_interval": 3},
    "diloco, int4": LATE | {"sync_method": "diloco", "sync_delay": 3, "sync_dtype": "int4", "wire_block": 32},
    "eager": {"islands": 3, "sync_method": "eager-diloco", "sync_interval": 3, "sync_delay": 3},
}


class Islands:
    """Their exchanges; their weights, which drift, are saved by others."""

    def __init__(self, config):
        self.weights = torch.randn(3, 60, generator=torch.Generator().manual_seed(0))
        self.rounds = rounds_of(config, self.weights, 30)
        self.step = 0

    def run(self, steps):
        history = []
        for _ in range(steps):
            random = torch.Generator().manual_seed(self.step)
            self.weights.add_(torch.randn(self.weights.shape, generator=random), alpha=0.1)
            self.rounds.after_iteration(self.step)
            self.step += 1
            history.append(self.weights.clone())
        return history

    def state(self):
        return copy.deepcopy(self.rounds.state_dict())

    def resume(self, other, state):
        self.step = other.step
        self.weights.copy_(other.weights)
        self.rounds.load_state_dict(state)


def test_islands():
    made = {name: partial(Islands, LossyConfig(**flags)) for name, flags in ISLANDS.items()}
    assert not unmissed(walks_of(made, (6, 9), 8), {})


AWAY = [
    (2, 3, "join"), (1, 4, "stop"), (1, 9, "return"), (1, 11, "stop"), (1, 13, "return"), (3, 5, "cut"),
    (3, 7, "return"), (3, 8, "freeze"), (3, 11, "return"), (2, 14, "freeze"), (2, 15, "return"),
]  # fmt: skip
SOON = LATE | {"islands": 4, "sync_delay": 3}
COME_AND_GO = {
    "copies": SOON,
    "listens": SOON | {"island_rejoin": "listen", "island_keep": 4},
    "keeps, smith": LATE
    | {"islands": 4, "island_keep": 100, "delay_correction": "smith:0.5", "island_rejoin": "listen"},
    "ema": SOON | {"delay_correction": "ema", "p_sync": 0.3, "island_rejoin": "listen"},
    "diloco": {"islands": 4, "sync_method": "diloco", "sync_interval": 3},
}


class Churning(ChurningRows):
    """The same of islands of which some are away; epochs are saved too."""

    def __init__(self, config):
        super().__init__(config, torch.randn(4, 60, generator=torch.Generator().manual_seed(0)), 30)

    def run(self, steps):
        def drift(step, weights, training):
            random = torch.Generator().manual_seed(step)
            weights[training] += 0.1 * torch.randn(weights.shape, generator=random)[training]

        history = []
        for _ in range(steps):
            self.iterate(drift)
            history.append((self.weights.clone(), list(self.records)))
            self.records.clear()
        return history

    def state(self):
        return copy.deepcopy({"rounds": self.rounds.state_dict(), "churn": self.churn.state_dict(self.step)})

    def resume(self, other, state):
        self.step = other.step
        self.weights.copy_(other.weights)
        self.churn.load_state_dict(state["churn"], self.step)
        self.rounds.load_state_dict(state["rounds"])


def test_islands_that_come_and_go(tmp_path):
    path = tmp_path / "events"
    path.write_text("".join(json.dumps({"slot": slot, "at": at, "event": what}) + "\n" for slot, at, what in AWAY))
    configs = {name: LossyConfig(**flags, island_schedule=str(path)) for name, flags in COME_AND_GO.items()}
    assert not unmissed(walks_of({name: partial(Churning, one) for name, one in configs.items()}, (6, 9, 12), 8), {})
