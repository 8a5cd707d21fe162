"""Islands that are launches of their own, as programs: none comes or goes, one dies and comes back, all die, flags differ."""

from __future__ import annotations

import json
import re
import signal
import time
from dataclasses import replace
from urllib.request import urlopen

import pytest
import torch

from megatron_lossy.base.checkpoints import latest_iteration
from megatron_lossy.mechanisms.islands.membership.messages import Slot, read, write
from megatron_lossy.mechanisms.islands.membership.store import open_store
from tests.coordinator import KEY
from tests.programs import Program, rank_environments, run_program
from tests.trainer import TINY, as_flags, read_records, weights_of

pytestmark = [pytest.mark.shows("islands that are launches of their own: start, death, return"), pytest.mark.programs]

MODEL = TINY | {"num_layers": 1, "log_interval": 1, "micro_batch_size": 1, "global_batch_size": 6, "eval_iters": 1}
SYNC = {"islands": 3, "sync_method": "parameters", "sync_fraction": 0.5, "sync_delay": 1, "transport": "pieces"}
LOSS = {"p_sync": 0.3, "loss_unit": "packet", "packet_bytes": 256}


class Run:
    """Islands of one run, each of ``ranks`` ranks, that meet at ``server``."""

    def __init__(self, server, settings, ranks=1, module="tests.quick_islands"):
        # Machines may be busy.
        own = {"rendezvous": server.url(), "udp_key_file": server.folder / "key", "island_patience": 60}
        self._settings, self.ranks, self._module = settings | own, ranks, module
        self.islands: dict[int, list[Program]] = {}

    def start(self, *slots, **more):
        for slot in slots:
            words = as_flags(self._settings | {"island": slot} | more)
            places = rank_environments(self.ranks) if self.ranks > 1 else [{}]
            self.islands[slot] = [Program(self._module, *words, **place) for place in places]

    def kill(self, slot):
        for program in self.islands.pop(slot):
            program.send_signal(signal.SIGKILL)
            program.communicate()

    def printed(self, slot):
        return "".join(program.printed() for program in self.islands[slot])

    def until(self, slot, text):
        """Wait until ``slot`` has printed ``text``, a pattern."""
        end = time.monotonic() + 120
        while not re.search(text, self.printed(slot)):
            assert time.monotonic() < end and not any(program.poll() for program in self.islands[slot]), self.ends()
            time.sleep(0.05)

    def ends(self, *slots):
        """By slot, exit statuses and what was printed and said, once ``slots``, or all, have ended."""
        found = {}
        for slot in slots or self.islands:
            programs = self.islands[slot]
            texts = [program.communicate(200) for program in programs]
            said = ("".join(part) for part in zip(*texts))
            found[slot] = ([program.returncode for program in programs], *said)
        return found

    def all_finish(self):
        """As :meth:`ends`, of islands that all end as they should."""
        ends = self.ends()
        assert not any(any(statuses) for statuses, *_ in ends.values()), ends
        return ends


def shown(server, name: str, slot: int) -> float:
    """Return a metric of an island in the coordinator's ``/metrics``."""
    with urlopen(f"http://127.0.0.1:{server.page}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return float(
        re.search(rf'^megatron_lossy_island_{name}{{run="run",slot="{slot}",.*}} (.*)$', text, re.MULTILINE)[1]
    )


def outer_of(folder):
    """Return the outer weights [1, size] of the first rank of an island, in its last checkpoint in ``folder``."""
    [path] = (folder / f"iter_{latest_iteration(folder):07d}" / "lossy_replicas").iterdir()
    found = list(values_of(torch.load(path, weights_only=True), "outer"))
    assert len(found) == 1, found
    return found[0]


def values_of(state, name):
    """Yield what is called ``name`` in ``state``, of dicts and lists."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ():
        if key == name:
            yield value
        yield from values_of(value, name)


WHOLE = {"eval_weights": "both", "save_consensus": True}
DILOCO = {"sync_method": "diloco", "sync_interval": 2, "save_replicas": True}
UDP = LOSS | {"transport": "udp", "p_grad": 0.1, "p_param": 0.1}


@pytest.mark.parametrize(
    ("ranks", "loss"),
    [
        pytest.param(1, WHOLE, id="1 rank"),
        pytest.param(1, LOSS, id="loss"),
        pytest.param(1, WHOLE | DILOCO | {"sync_dtype": "int8", "p_sync": 0.1}, id="diloco"),
        pytest.param(2, LOSS | WHOLE, id="2 ranks", marks=pytest.mark.nightly),
        pytest.param(2, UDP, id="datagrams"),
    ],
)
def test_where_none_comes_or_goes_all_is_as_in_one_launch(data, tmp_path, serve, ranks, loss):
    settings = MODEL | data | SYNC | {"train_iters": 8, "eval_weights": "replica"}
    settings |= ({"sync_dtype": "bf16"} if ranks == 1 else {}) | loss
    once = run_program("megatron_lossy.train", *as_flags(settings | {"save": tmp_path / "one"}), ranks=3 * ranks)
    assert once.returncode == 0, once.stderr
    run = Run(serve(), settings | {"save": tmp_path / "apart", "save_replicas": True}, ranks)
    run.start(0, 1, 2, **({} if "transport" in loss else {"udp_peer_timeout": 600}))  # a silent one is waited for 60 s
    run.all_finish()
    for slot in range(3):
        assert weights_of(tmp_path / "one" / f"island_{slot}") == weights_of(tmp_path / "apart" / f"island_{slot}")
    assert weights_of(tmp_path / "apart" / "island_0") != weights_of(tmp_path / "apart" / "island_1")
    if "save_consensus" in loss:
        assert weights_of(tmp_path / "one" / "consensus") == weights_of(tmp_path / "apart" / "consensus")
        own = [read_records(tmp_path / "apart" / f"island_{slot}", "valid") for slot in range(3)]
        assert {record["weights"] for records in own for record in records} == {"replica", "consensus"}


@pytest.mark.parametrize(
    ("rejoin", "transport", "dtype"),
    [
        pytest.param("copy", "pieces", "fp32", marks=pytest.mark.nightly),
        pytest.param("listen", "pieces", "int8", marks=pytest.mark.nightly),
        ("copy", "udp", "int8"),
        pytest.param("copy", "stream", "fp32", marks=pytest.mark.nightly),
    ],
)
def test_who_is_killed_is_left_out_and_comes_back(data, tmp_path, serve, rejoin, transport, dtype):
    """The others go on; it takes the iteration of the run, listens or copies another one, and then sends."""
    settings = MODEL | data | SYNC | {"train_iters": 1200, "eval_interval": 600, "log_interval": 10}
    settings |= {"metrics_dir": tmp_path, "delivery_log": tmp_path / "log", "island_rejoin": rejoin}
    server = serve()
    run = Run(server, settings | {"transport": transport, "sync_dtype": dtype})
    run.start(0, 1, 2)
    run.until(1, r"iteration +30/")
    run.kill(2)
    run.until(0, r"iteration +80/")
    while not shown(server, "lost_ratio", 0):
        time.sleep(0.1)
    assert 0 < shown(server, "lost_ratio", 0) < 1 and 0 < shown(server, "loss", 0) < 10
    run.start(2, metrics_dir=tmp_path / "again", delivery_log=tmp_path / "again")
    run.until(2, "goes on at iteration")
    ends = run.all_finish()
    for slot in (0, 1):
        assert "lost contact" in ends[slot][2]
    began = int(re.search(r"goes on at iteration +(\d+): (\d+) were made without this island", ends[2][1])[1])
    assert began >= 80
    if rejoin == "listen":
        assert "it listens until means have set its weights" in ends[2][2]
    else:
        copied = re.search(r"has copied island 0 as of iteration (\d+), rank 0 (\w+)", ends[2][2])
        assert copied, ends[2][2]
        assert int(copied[1]) >= 80
        assert f"island 2 copies it as of iteration {copied[1]}, rank 0 {copied[2]}" in ends[0][2]
    for slot, other in ((0, 1), (1, 0)):
        epochs = [json.loads(line) for line in (tmp_path / "log" / f"island_{slot}" / "_epochs.jsonl").open()]
        assert [member for member, _ in epochs[0]["members"]] == [0, 1, 2]
        assert any(one["event"] == "lost contact" for line in epochs for one in line["events"])
        assert {slot, other} in [{member for member, _ in line["members"]} for line in epochs]
    folders = [tmp_path, tmp_path, tmp_path / "again"]
    last = [read_records(folder / f"island_{slot}", "train")[-1]["lm loss"] for slot, folder in enumerate(folders)]
    # Of the text that all are trained on.
    assert max(last) < read_records(tmp_path / "island_0", "train")[0]["lm loss"] / 2


@pytest.mark.parametrize("form", [{}, {"sync_dtype": "int4"}], ids=["fp32", "int4"])
def test_diloco_goes_on_with_the_outer_weights_of_the_island_that_it_copies(data, tmp_path, serve, form):
    """Means under way, which a copy misses, matter less after each exchange: at the end outer weights are equal."""
    settings = MODEL | data | SYNC | DILOCO | {"train_iters": 1200, "eval_interval": 1200, "log_interval": 10} | form
    run = Run(serve(), settings | {"save": tmp_path})
    run.start(0, 1, 2)
    run.until(1, r"iteration +30/")
    run.kill(2)
    run.until(0, r"iteration +80/")
    run.start(2, save=tmp_path / "again")
    ends = run.all_finish()
    assert re.search(r"has copied island 0 as of iteration \d+, rank 0 \w+", ends[2][2]), ends[2][2]
    folders = [tmp_path, tmp_path, tmp_path / "again"]
    states = [outer_of(folder / f"island_{slot}") for slot, folder in enumerate(folders)]
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], atol=1e-5, rtol=0)


def test_all_die_and_go_on_from_their_checkpoints(data, tmp_path, serve):
    """One had saved later than the others: it sends, and they listen or keep, by how far they are behind."""
    settings = MODEL | data | SYNC | {"train_iters": 400, "eval_interval": 400, "log_interval": 10}
    settings |= {"save": tmp_path, "load": tmp_path, "save_interval": 20, "save_replicas": True}
    run = Run(serve(), settings)
    run.start(0, 1, 2)
    for slot in range(3):
        run.until(slot, "saved checkpoint of iteration +40")
    for slot in range(3):
        run.kill(slot)
    time.sleep(3)  # their heartbeats are over
    run.start(0, 1, 2)
    ends = run.all_finish()
    assert all("loaded checkpoint" in out and "iteration      400/" in out for _, out, _ in ends.values())


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"island": 0}, r"--island 0: the island at .* has this slot, and is alive"),
        ({"sync_fraction": 0.25}, r"--sync-fraction 0.25: island 0 at .* has 0.5; all must be alike"),
        ({"lr": 0.5}, r"--lr 0.5: island 0 at .* has .*; all must be alike"),
        (
            "data",
            r"--data-path \(digest of its text .*\): island 0 at .* has \(digest of its text .*\); all must be alike",
        ),
    ],
    ids=["slot", "loss flag", "training flag", "data"],
)
def test_a_wrong_start_is_refused_and_ends_no_other(data, serve, other, why):
    run = Run(serve(), MODEL | data | SYNC | {"island_join": 2, "train_iters": 10**5, "eval_interval": 10**5})
    run.start(0)
    run.until(0, r"iteration +10/")
    run.start(1, **({"data_path": data["valid_data_path"]} if other == "data" else other))
    [program] = run.islands[1]
    _, said = program.communicate(100)
    assert program.returncode == 2, said
    assert re.search(why, said), said
    run.islands[0][0].send_signal(signal.SIGTERM)
    assert run.ends()[0][0] == [3]


@pytest.mark.nightly
def test_who_is_alone_evaluates_its_own_mean_and_who_misses_one_does_not_stop_the_others(data, tmp_path, serve):
    """An island is killed, and the others evaluate with what they still have in common, and save it."""
    settings = MODEL | data | SYNC | WHOLE | {"train_iters": 1000, "eval_interval": 20, "log_interval": 10}
    run = Run(serve(), settings | {"save": tmp_path, "save_interval": 500, "save_replicas": True})
    run.start(0, 1, 2)
    run.until(1, r"iteration +30/")
    run.kill(0)
    run.all_finish()
    for slot in (1, 2):
        records = read_records(tmp_path / f"island_{slot}", "valid")
        whose = {record["iteration"]: record["weights"] for record in records if record["weights"] != "replica"}
        assert whose.keys() == set(range(20, 1001, 20)) and {whose[20], whose[1000]} == {"consensus"}
    assert latest_iteration(tmp_path / "consensus") == 1000  # by the next island


def test_sigterm_ends_one_island_alone_and_a_later_start_the_one_of_its_slot(data, tmp_path, serve):
    """Both save, and have an exit status of their own on all ranks."""
    server = serve()
    settings = MODEL | data | SYNC | {"train_iters": 10**5, "eval_interval": 10**5, "log_interval": 10}
    run = Run(server, settings | {"save_replicas": True}, ranks=2)
    run.start(0, 1, 2, save=tmp_path)
    run.until(1, r"iteration +30/")
    run.islands[1][0].send_signal(signal.SIGTERM)
    statuses, printed, _ = run.ends(1)[1]
    assert statuses == [3, 3] and "exiting on SIGTERM" in printed
    assert latest_iteration(tmp_path / "island_1") >= 30

    frozen = run.islands.pop(2)
    for program in frozen:
        program.send_signal(signal.SIGSTOP)
    store = open_store(server.url(), KEY)
    holder = read(Slot, store.get("now/slot/2"))
    store.put("now/slot/2", write(replace(holder, address="127.0.0.1:1")))  # as if its machine were off
    run.start(2, save=tmp_path / "later")
    run.until(2, r"goes on at iteration")
    for program in frozen:
        program.send_signal(signal.SIGCONT)
    said = [program.communicate(200)[1] for program in frozen]
    assert [program.returncode for program in frozen] == [4, 4]
    assert f"error: --island 2: a later start at {holder.host} has taken this slot" in "".join(said)
    assert latest_iteration(tmp_path / "island_2") >= 30
    for slot in (0, 2):
        assert not any(program.poll() for program in run.islands[slot])
        run.islands[slot][1].send_signal(signal.SIGTERM)
    assert [statuses for statuses, *_ in run.ends(0, 2).values()] == [[3, 3]] * 2


def test_a_store_that_does_not_answer_is_named(data, serve):
    server = serve()
    server.end(signal.SIGKILL)
    run = Run(server, MODEL | data | SYNC | {"island_join": 2})
    run.start(0)
    statuses, _, said = run.ends()[0]
    assert statuses == [2] and "; going on as before" in said
    line = rf"error: --rendezvous {server.url()}: no answer for \d+ s \(--island-join 2\): 127.0.0.1:{server.port}: "
    assert re.search(line, said)


def test_tensor_parallel_ranks_average_as_in_one_launch_over_datagrams_and_in_8_bits(data, tmp_path, serve):
    """Each of them loses, and rounds, other units: their copies of parameters are those of the first one."""
    settings = MODEL | data | SYNC | LOSS | {"train_iters": 8, "eval_weights": "replica", "sync_dtype": "int8"}
    settings |= {"tensor_model_parallel_size": 2}
    once = run_program("megatron_lossy.train", *as_flags(settings | {"save": tmp_path / "one"}), ranks=6)
    assert once.returncode == 0, once.stderr
    apart = settings | {"save": tmp_path / "apart", "save_replicas": True, "transport": "udp"}
    run = Run(serve(), apart, ranks=2, module="tests.copies_compared")
    run.start(0, 1, 2)
    for slot, (_, printed, _) in run.all_finish().items():
        assert len(re.findall(r"copies of [1-9]\d* parameters are equal", printed)) == 2, printed
        assert weights_of(tmp_path / "one" / f"island_{slot}") == weights_of(tmp_path / "apart" / f"island_{slot}")


@pytest.mark.nightly
def test_tensor_parallel_ranks_keep_their_copies_equal_through_deaths(data, tmp_path, serve):
    """A death may break one of them: tests.copies_compared compares them at the end."""
    settings = MODEL | data | SYNC | {"train_iters": 900, "eval_interval": 900, "log_interval": 10}
    settings |= {"tensor_model_parallel_size": 2, "save": tmp_path, "load": tmp_path, "save_interval": 20}
    settings |= {"save_replicas": True, "transport": "udp", "sync_dtype": "int8"}
    run = Run(serve(), settings, ranks=2, module="tests.copies_compared")
    run.start(0, 1, 2)
    for slot, reached in ((2, 40), (1, 160)):
        run.until(0, rf"iteration +{reached}/")
        run.kill(slot)
        run.until(0, rf"iteration +{reached + 40}/")
        run.start(slot)
        run.until(slot, "goes on at iteration")
    ends = run.all_finish()
    for _, printed, _ in ends.values():
        assert len(re.findall(r"copies of [1-9]\d* parameters are equal", printed)) == 2, printed
    assert "has copied island" in ends[1][2] and "lost contact" in ends[0][2]
