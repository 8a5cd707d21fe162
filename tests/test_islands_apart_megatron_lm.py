"""Islands that are launches of their own, of the unmodified pretrain_gpt.py of a checkout of Megatron-LM.

pytest tests/test_islands_apart_megatron_lm.py --megatron-lm=/path/to/Megatron-LM      (about three minutes)
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from megatron_lossy.mechanisms.islands.megatron_training import SkippedIterations, alike
from tests.test_islands_megatron_lm import losses
from tests.test_plugin_megatron_lm import ENVIRONMENT, MODEL, PRINTED, pretrain

pytestmark = [
    pytest.mark.shows("islands that are launches of their own, of the unmodified `pretrain_gpt.py`"),
    pytest.mark.timeout(600),
]

SYNC = ["--islands", 2, "--sync-method", "parameters", "--sync-fraction", 0.25, "--sync-delay", 3]


class Islands:
    """Launches of one process each that meet at ``server`` and print to files in ``folder``."""

    def __init__(self, megatron_lm, server, folder, *flags):
        own = ["--rendezvous", server.url(), "--udp-key-file", server.folder / "key", "--island-patience", 60]
        script = os.path.join(megatron_lm, "pretrain_gpt.py")
        self._words = ["-m", "megatron_lossy", script, *MODEL, *SYNC, *own, *flags]
        self._folder, self.programs = folder, {}

    def start(self, *slots):
        for slot in slots:
            words = [sys.executable, *map(str, self._words), "--island", str(slot)]
            with open(self._folder / f"{slot}.log", "w") as file:
                environment = ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}
                self.programs[slot] = subprocess.Popen(words, stdout=file, stderr=file, env=environment)

    def printed(self, slot):
        return (self._folder / f"{slot}.log").read_text()

    def until(self, slot, text):
        end = time.monotonic() + 200
        while not re.search(text, self.printed(slot)):
            assert time.monotonic() < end and self.programs[slot].poll() is None, self.printed(slot)[-3000:]
            time.sleep(0.1)

    def end(self):
        for slot, program in self.programs.items():
            assert program.wait(300) == 0, self.printed(slot)[-3000:]


def found(text):
    return losses(re.findall(PRINTED, text))


@pytest.mark.megatron_lm
def test_where_none_comes_or_goes_all_is_as_in_one_launch(megatron_lm, tmp_path, serve):
    whole, done = pretrain(megatron_lm, *SYNC, "--eval-weights", "replica")
    assert done.returncode == 0, done.stderr[-3000:]
    islands = Islands(megatron_lm, serve(), tmp_path, "--eval-weights", "replica")
    islands.start(0, 1)
    islands.end()
    together, _ = losses(whole)
    apart = [found(islands.printed(slot))[0] for slot in range(2)]
    assert len(together) == len(apart[0]) == 20
    for number, both in together.items():
        assert sorted(both) == sorted(one[number][0] for one in apart), number


@pytest.mark.megatron_lm
@pytest.mark.parametrize("transport", ["pieces", "udp"])
def test_who_is_killed_is_left_out_and_comes_back(megatron_lm, tmp_path, serve, transport):
    """It skips the iterations that it missed, of the same samples and learning rate, and copies the other island."""
    flags = ["--train-iters", 1500, "--transport", transport, "--eval-interval", 1000]
    islands = Islands(megatron_lm, serve(), tmp_path, *flags)
    islands.start(0, 1)
    islands.until(1, r"iteration +30/")
    islands.programs[1].send_signal(signal.SIGKILL)
    islands.programs[1].wait()
    islands.until(0, "lost contact")
    islands.start(1)
    islands.until(1, "island 1 goes on at iteration")
    islands.end()
    texts = [islands.printed(slot) for slot in range(2)]
    copied = re.search(r"has copied island 0 as of iteration (\d+), rank 0 (\w+)", texts[1])
    assert copied and f"island 1 copies it as of iteration {copied[1]}, rank 0 {copied[2]}" in texts[0]
    rates = [dict(re.findall(r"iteration +(\d+)/.*?learning rate: ([\d.E+-]+)", text)) for text in texts]
    samples = [dict(re.findall(r"iteration +(\d+)/.*?consumed samples: +(\d+)", text)) for text in texts]
    both = rates[0].keys() & rates[1].keys()
    assert len(both) > 100
    for number in both:
        assert (rates[0][number], samples[0][number]) == (rates[1][number], samples[1][number]), number
    last = [found(text)[0][1500][0] for text in texts]
    assert max(last) < found(texts[0])[0][1][0] / 2


@pytest.mark.shows("islands that copy another one")
def test_iterations_to_skip_are_those_given_and_those_behind_and_are_saved_as_a_list():
    asked = []

    def ahead():
        asked.append(1)
        return len(asked) < 3

    skipped = SkippedIterations([7], ahead)
    assert 5 in skipped and 6 in skipped and 7 in skipped and 8 not in skipped and len(asked) == 4
    assert type(pickle.loads(pickle.dumps(skipped))) is list and list(skipped) == [7]
    skipped.extend([9])
    assert 9 in skipped


@pytest.mark.megatron_lm
def test_an_island_with_another_flag_of_megatron_is_refused(megatron_lm, tmp_path, serve):
    islands = Islands(megatron_lm, serve(), tmp_path, "--island-join", 30)
    islands.start(0)
    islands._words += ["--adam-beta2", 0.5]
    islands.start(1)
    islands.until(0, "iteration +1/|--adam-beta2")
    ended = [program.wait(300) for program in islands.programs.values()]
    assert sorted(ended) == [0, 2]
    refused = islands.printed(ended.index(2))
    assert re.search(r"--adam-beta2 .*: island \d at .* has .*; all must be alike", refused), refused[-2000:]


def test_arguments_of_megatron_that_all_must_have_alike_are_those_that_it_has():
    args = SimpleNamespace(num_layers=2, lr=0.001, rampup_batch_size=None, save="here", rank=3)
    assert alike(args) == {"--num-layers": "2", "--lr": "0.001", "--rampup-batch-size": "None"}
