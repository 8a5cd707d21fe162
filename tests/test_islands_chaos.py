"""Chaos: islands that are launches of their own are killed, frozen and added, and so is the coordinator; the others go on."""

from __future__ import annotations

import json
import signal
import time

import pytest

from tests.programs import Program
from tests.test_islands_apart import MODEL, SYNC, Run
from tests.test_lab import needs_lab
from tests.trainer import read_records

pytestmark = [
    pytest.mark.shows("islands that are launches of their own: killed, frozen, cut off, new"),
    pytest.mark.programs,
    pytest.mark.nightly,
]

PATIENCE = 4.0


class Chaos(Run):
    """A run whose islands write diaries below ``folder``."""

    def __init__(self, server, settings, folder):
        more = {"metrics_dir": folder / "metrics", "delivery_log": folder / "log"}
        super().__init__(server, settings | more)
        self._settings |= {"island_patience": PATIENCE}
        self._folder = folder

    def lines(self, slot):
        file = self._folder / "log" / f"island_{slot}" / "_epochs.jsonl"
        whole = file.read_text().rpartition("\n")[0] if file.exists() else ""
        return [json.loads(line) for line in whole.splitlines()]

    def roles(self, slot):
        """By member, its role in the epoch in which ``slot`` exchanges."""
        latest = next(iter(reversed(self.lines(slot))), None)
        return latest and dict(zip((slot for slot, _ in latest["members"]), latest["roles"]))

    def until_together(self, *slots):
        """Wait until all of ``slots``, and nobody else, are in one epoch, and all of them send."""
        end = time.monotonic() + 180
        while any(self.roles(slot) != dict.fromkeys(slots, "send") for slot in slots):
            assert time.monotonic() < end and not any(self.ended(slot) for slot in slots), self.ends()
            time.sleep(0.1)

    def ended(self, slot):
        return any(program.poll() is not None for program in self.islands[slot])

    def signal(self, slot, number):
        for program in self.islands[slot]:
            program.send_signal(number)

    def made(self, slot):
        return len(read_records(self._folder / "metrics" / f"island_{slot}", "train"))


def events(lines, name):
    return [event for line in lines for event in line["events"] if event["event"] == name]


def test_survivors_go_on_and_wait_for_nobody_twice(tmp_path, serve, data):
    server = serve()
    folder = tmp_path / "saved"
    settings = MODEL | data | SYNC | {"islands": 4, "global_batch_size": 8, "train_iters": 10**5, "island_join": 5}
    settings |= {"save": folder, "load": folder, "save_interval": 20, "save_replicas": True, "eval_interval": 10**5}
    run = Chaos(server, settings, tmp_path)
    run.start(0, 1, 2)
    run.until_together(0, 1, 2)

    run.kill(1)
    run.until_together(0, 2)
    run.start(1)
    run.until_together(0, 1, 2)

    run.signal(2, signal.SIGSTOP)
    run.until_together(0, 1)
    run.signal(2, signal.SIGCONT)
    run.until_together(0, 1, 2)

    server.end(signal.SIGKILL)
    before = run.made(0)
    while run.made(0) < before + 20:  # as before, all together
        assert not run.ended(0)
        time.sleep(0.1)
    lost = len(events(run.lines(0), "lost contact"))
    run.kill(1)
    while len(events(run.lines(0), "lost contact")) == lost:  # and the other one goes on with it
        assert not run.ended(0)
        time.sleep(0.1)
    serve(server.port)
    run.start(1)
    run.until_together(0, 1, 2)

    run.start(3)
    run.until_together(0, 1, 2, 3)
    for slot in range(4):
        run.signal(slot, signal.SIGTERM)
    assert {slot: statuses for slot, (statuses, *_) in run.ends().items()} == {slot: [3] for slot in range(4)}

    lines = run.lines(0)  # of one to which nothing was done
    contacts = [(line["id"], one["with_island"]) for line in lines for one in events([line], "lost contact")]
    assert len(contacts) >= 3
    assert len(set(contacts)) == len(contacts)  # nobody is waited for twice in an epoch
    assert len(events(run.lines(2), "gave up")) >= 1  # it was frozen
    assert events(run.lines(3), "listens")

    records = read_records(tmp_path / "metrics" / "island_0", "train")
    made = [record["iteration"] for record in records]
    # Where machines are busy, the others may have been quicker.
    left = {event["now"] for event in events(lines, "gave up")}
    assert all(later == earlier + 1 or later - 1 in left for earlier, later in zip([0, *made], made))
    lost = {exchange for line in lines for exchange in line["lost"]}
    alone = {record["iteration"] - 1 for record in records if record["island members"] == 0}
    assert alone <= lost < set(range(made[-1]))  # each one averaged, or logged as lost
    assert records[-1]["lm loss"] < records[0]["lm loss"] / 2


@needs_lab
@pytest.mark.timeout(1200)
def test_islands_that_are_cut_off_and_killed_meet_again(tmp_path):
    """One is cut off for less than the patience and for longer, one is killed, over datagrams.

    A start takes half a minute: until then the other one makes some hundred iterations alone.
    """
    happens = [(1, 40, "cut"), (1, 50, "return"), (1, 100, "cut")]
    happens += [(2, 160, "stop"), (2, 300, "return"), (1, 800, "return")]
    file = tmp_path / "events.jsonl"
    file.write_text("".join(json.dumps({"slot": slot, "at": at, "event": event}) + "\n" for slot, at, event in happens))
    model = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 2 --micro-batch-size 8"
    model += " --global-batch-size 24 --eval-interval 1500 --island-keep 1000 --sync-interval 1 --sync-delay 0"
    words = ["--schedule", file, "--islands", 3, "--iterations", 1500, "--rtt", 50, "--out", tmp_path / "out"]
    program = Program("benchmarks.churn", *words, f"--flags={model} --transport udp --island-patience 3")
    printed, said = program.communicate(1150)
    assert program.returncode == 0, printed + said
    log = tmp_path / "out" / "seed_1" / "log"
    epochs = [json.loads(line) for line in (log / "island_0" / "_epochs.jsonl").open()]
    lost = {event.get("with_island") for line in epochs for event in line["events"] if event["event"] == "lost contact"}
    assert lost == {1, 2} and [slot for slot, _ in epochs[-1]["members"]] == [0, 1, 2]
