"""A virtual run saves all that it needs with --save-replicas: every entry of the file is taken away in turn."""

import copy

import pytest
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.hooks.versions import optimizers
from megatron_lossy.lab.virtual import VirtualCluster
from megatron_lossy.lab.virtual.replicas import VirtualReplicas
from tests.ranks import run_ranks
from tests.saved_state import unmissed, walk
from tests.test_saved_state import BURSTS, ERRORS, LEAD, trace
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows("no entry of a saved state can be taken away unnoticed")

BOTH = {"p_grad": 0.4, "p_param": 0.4, "save_replicas": True}
SMALL_PACKETS = {"loss_unit": "packet", "packet_bytes": 256}
CLUSTERS = {
    "feedback, drift": BOTH | SMALL_PACKETS | {"grad_recovery": "error-feedback", "drift_interval": 3},
    "previous, lead": BOTH | SMALL_PACKETS | BURSTS | LEAD | {"grad_recovery": "previous"},
    "lead, counted": SMALL_PACKETS | LEAD | {"loss_model": ("trace",), "save_replicas": True},
    "stages": BOTH | SMALL_PACKETS | {"async_pipeline": True, "virtual_stages": 2},
    "boundaries": {"p_act": 0.3, "p_act_grad": 0.3, "virtual_boundaries": (1,), "packet_bytes": 256}
    | {"p_param": 0.4, "save_replicas": True},
    "replicas": {"p_grad": 0.3, "grad_recovery": "previous", "save_replicas": True}
    | SMALL_PACKETS | ERRORS | {"param_sync_interval": 4, "param_sync_overlap": True, "drift_interval": 3},
}  # fmt: skip


class Virtual:
    """A virtual run of two workers; weights and optimizers, which are in a checkpoint, are saved by others."""

    def __init__(self, config, folder):
        make = VirtualReplicas if config.needs_whole_optimizers() else VirtualCluster
        self.cluster = make(config, 2, gapless=True)
        tiny = TinyGPT(
            distributed_optimizer=not config.needs_whole_optimizers(),
            hidden=16,
            heads=2,
            tied=not config.async_pipeline,
        )
        self.tiny = build(tiny, self.cluster)
        self.inner = [one.optimizer for one in optimizers(self.tiny.optimizer)]
        self.parameters = list(self.tiny.model[0].module.parameters())
        self.folder = folder
        self.file = folder / "lossy_replicas" / self.cluster.replica_file()

    def run(self, steps):
        history = []
        for _ in range(steps):
            step = self.cluster.iteration
            told = self.tiny.step(step)
            history.append([told["loss"], told["grad_norm"], self.cluster.update])
            if step % 4 == 3:
                history.append(self.cluster.metrics())
        return history

    def checkpoint(self):
        """Return the entries of a checkpoint outside the file."""
        with self.cluster.owner_weights(self.tiny.model):
            weights = [one.detach().clone() for one in self.parameters]
        return weights, copy.deepcopy([one.state_dict() for one in self.inner]), self.cluster.iteration

    def state(self):
        self.cluster.save_replicas(self.folder)
        return torch.load(self.file, weights_only=True)

    def resume(self, checkpoint, state):
        """Go back: nothing of what was done since may be left."""
        weights, optimizers, iteration = copy.deepcopy(checkpoint)
        self.cluster.set_iteration(iteration)
        with torch.no_grad():
            for one, value in zip(self.parameters, weights, strict=True):
                one.copy_(value)
        for one, value in zip(self.inner, optimizers, strict=True):
            one.load_state_dict(value)
        self.cluster.set_iteration(iteration)
        torch.save(state, self.file)
        self.cluster.load_replicas(self.folder)


def virtual_runs(rank, folder, cases):
    results = {}
    for name, flags in cases.items():
        (folder / name).mkdir()
        if flags.get("loss_model") == ("trace",):
            cut = Virtual(LossyConfig(**BOTH | SMALL_PACKETS), folder / name).cluster.groups[0].wire.cut
            flags = flags | {"trace": trace(folder, 2, sum(units.count for units in cut["param"]))}
        one = Virtual(LossyConfig(**flags), folder / name)
        fresh = one.state()
        one.run(6)
        state, checkpoint = one.state(), one.checkpoint()
        expected = one.run(3)

        def goes_on(changed, one=one, checkpoint=checkpoint, expected=expected):
            if changed is None:
                return expected
            one.resume(checkpoint, changed)
            return one.run(3)

        results[name] = walk(state, fresh, goes_on)
        one.cluster.uninstall()
    return results


@pytest.mark.slow
def test_virtual_runs(tmp_path):
    [walks] = run_ranks(virtual_runs, 1, tmp_path, CLUSTERS, timeout=1000)
    results = {}
    for name, (continues, results[name]) in walks.items():
        assert continues, name
    problems = unmissed(
        results,
        {
            "format": "the same for all",
            "identity*": "flags that are not there had their default; every other difference is refused",
            "iteration": "the checkpoint says so, too",
            "observers/megatron_lossy.ExchangeMonitor/ages/*/*/*": "a stream without another name is the dense one",
            "replicas/synchroniser/*": "walked above",
            "recovery/*/grad/*/received": "walked above: here is known which step comes next",
            "recovery/*/param/*/before": "walked above: here the next update begins later",
            "recovery/*/counted/*/steps": "of an update that is gathered again",
            "recovery/*/counted/*/ages": "walked above, where a run goes on for longer",
            "recovery/*/counted/*/agreed": "walked above: here the next update replaces it at once",
        },
    )
    assert not problems, problems
