"""FSDP2 on islands that are launches of their own, and come and go."""

import json
import re
import signal
from collections import deque

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.copying import receive_copy, send_copy
from megatron_lossy.mechanisms.islands.elastic import ElasticIslands
from megatron_lossy.mechanisms.islands.fsdp import ElasticFSDPIslands
from megatron_lossy.pytorch import make_lossy
from tests import fsdp
from tests.programs import Program, rank_environments, run_program, until

pytestmark = [pytest.mark.shows("FSDP2: islands that come and go"), pytest.mark.programs]

SYNC = {"islands": 2, "sync_method": "parameters", "sync_interval": 2, "transport": "pieces"}
APART = SYNC | {"rendezvous": "etcd://localhost:1/run", "island": 0}
LOST = {"loss_unit": "packet", "packet_bytes": 64, "p_grad": 0.2, "p_param": 0.2, "p_sync": 0.2}


class Islands:
    """Islands in ``folder`` that meet at ``server``, each of ``ranks`` ranks."""

    def __init__(self, server, folder, flags, steps, ranks=1, pause=0.0):
        own = {"rendezvous": server.url(), "udp_key_file": str(server.folder / "key"), "island_patience": 60.0}
        self._words, self._flags, self._ranks = (folder, steps, pause), flags | own, ranks
        self.programs = {}

    def start(self, island, **more):
        words = *self._words, json.dumps(self._flags | {"island": island} | more)
        places = rank_environments(self._ranks)
        self.programs[island] = [Program("tests.elastic_fsdp", *words, **place) for place in places]

    def until(self, island, text):
        [first, *_] = self.programs[island]
        until(lambda: re.search(text, first.printed()), *self.programs[island], seconds=120)

    def end(self):
        for programs in self.programs.values():
            for program in programs:
                said = program.communicate(300)
                assert program.returncode == 0, said
                yield said


def weights_of(folder, island):
    return dict(np.load(folder / f"island_{island}_0.npz"))


@pytest.mark.parametrize(
    "flags",
    [LOST | {"sync_fraction": 0.5, "sync_delay": 1}, {"sync_method": "diloco", "sync_dtype": "int8", "p_sync": 0.1}],
    ids=["parameters", "diloco"],
)
def test_where_none_comes_or_goes_all_is_as_in_one_launch(serve, tmp_path, flags):
    for folder in (one := tmp_path / "one", apart := tmp_path / "apart"):
        folder.mkdir()
    done = run_program("tests.elastic_fsdp", one, 8, 0, json.dumps(SYNC | flags), ranks=4)
    assert done.returncode == 0, done.stderr
    islands = Islands(serve(), apart, SYNC | flags, 8, ranks=2)
    for island in range(2):
        islands.start(island)
    said = list(islands.end())
    assert all("consensus True" in out for out, _ in said)
    for island, rank in ((0, 0), (1, 2)):
        there = dict(np.load(one / f"island_{island}_{rank}.npz"))
        for name, values in weights_of(apart, island).items():
            np.testing.assert_array_equal(values, there[name], err_msg=name)


def test_one_that_is_killed_comes_back_with_the_weights_and_moments_of_another(serve, tmp_path):
    """It has its checkpoint, which is old. At the last exchange all have the outer weights."""
    outer = {"sync_method": "diloco", "outer_optimizer": (0.2, 0.0)}  # with which means alone take long
    islands = Islands(serve(), tmp_path, SYNC | outer, 400, ranks=2, pause=0.05)
    for island in range(2):
        islands.start(island)
    islands.until(1, "step 30:")
    for program in islands.programs[1]:
        program.send_signal(signal.SIGKILL)
        program.communicate()
    islands.until(0, "step 60:")
    islands.start(1)
    (first, _), _, *again = list(islands.end())
    for out, said in again:
        assert int(re.search(r"^step (\d+):", out)[1]) > 60
        assert re.search(r"has copied island 0 as of iteration \d+", said)
    losses = [float(loss) for loss in re.findall(r"step \d+: (\S+)", again[0][0])]
    began = float(re.search(r"step 0: (\S+)", first)[1])
    assert np.mean(losses[-10:]) < began
    for name, values in weights_of(tmp_path, 0).items():
        if not name.endswith("moment"):
            np.testing.assert_allclose(values, weights_of(tmp_path, 1)[name], atol=1e-5, err_msg=name)


def copied(rank):
    """Return the weights and moments of a run, and of one that copies it, before a step of both and after."""
    runs = [fsdp.Training(fsdp.Tiny(seed=seed), LossyConfig(**APART)) for seed in range(2)]
    for run in runs:
        run.lossy.job_group._entered = True  # there is nobody else
    for step in range(3):
        runs[0].step(step)
    vectors = [run.lossy.job_group._vector(run.lossy) for run in runs]
    parts = deque()
    send_copy(lambda part: parts.append(part.clone()), vectors[0].held_state(runs[0].optimizer), 3)
    vectors[1].put_state(runs[1].optimizer, receive_copy(lambda part: part.copy_(parts.popleft())).values)
    runs[1].lossy.weights_changed()
    before = [run.weights() for run in runs]
    for run in runs:
        run.step(3)
    return before, [run.weights() for run in runs]


def test_a_copy_has_all_shards_moments_and_step_counts(pool):
    """Shards are uneven, and some are empty."""
    for pairs in pool.run(copied, 2):
        for one, other in pairs:
            assert one.keys() == other.keys() and any(name.endswith("moment") for name in one)
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def layouts(rank):
    """Return the layouts of the same parameters in other groups."""
    found = []
    for blocks in (slice(1, 4), slice(1, 1)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        for module in (*model[blocks], model):
            fully_shard(module)
        lossy = make_lossy(model, torch.optim.SGD(model.parameters()), LossyConfig(**APART), steps=8)
        found.append(lossy.job_group.flags()["layout"])
        lossy.close()
    return found


def test_another_order_of_the_same_elements_is_another_layout(pool):
    one, other = pool.run(layouts, 2)[0]
    assert json.loads(one)[0] == json.loads(other)[0] and one != other


def test_weights_that_a_mean_has_set_after_a_rejected_step_are_gathered(monkeypatch):
    islands, done = object.__new__(ElasticFSDPIslands), []
    islands._entered, islands._updates, islands._replaced, islands._agreed = True, 3, 0, int
    for name in ("end_iteration", "_gather"):
        monkeypatch.setattr(ElasticFSDPIslands, name, lambda self, name=name: done.append(name))
    monkeypatch.setattr(ElasticIslands, "catch_up", lambda self, iteration: iteration)
    monkeypatch.setattr(ElasticIslands, "begin_agreeing", lambda *_: int)
    assert islands.catch_up(4) == 4 and done == ["end_iteration", "_gather"]
    done.clear()
    assert islands.catch_up(4) == 4 and not done


def refused(rank):
    """Return the lines of programs that cannot come back."""
    config, mesh = LossyConfig(**APART), ("cpu", (2, 1))
    tiny, said = fsdp.Tiny(), []
    for act in (
        lambda model: make_lossy(model, [torch.optim.SGD([one]) for one in model.parameters()], config),
        lambda _: make_lossy(
            other := fsdp.build(tiny, init_device_mesh(*mesh, mesh_dim_names=("a", "b"))["b"]),
            torch.optim.SGD(other.parameters()),
            config,
        ),
        lambda _: fsdp.Training(tiny, config).step(0),
    ):
        with pytest.raises(UsageError) as error:
            act(fsdp.build(tiny))
        said.append(str(error.value))
    return said


def test_a_program_that_cannot_come_back_is_refused(pool):
    several, groups, never = pool.run(refused, 2)[0]
    assert re.match(r"optimizer \d+ optimizers: must be one, which an island that comes back can copy", several)
    assert "needs fully_shard over all ranks of the launch" in groups
    assert (
        never.startswith("--rendezvous etcd://localhost:1/run: needs a loop that can go on") and "catch_up()" in never
    )
