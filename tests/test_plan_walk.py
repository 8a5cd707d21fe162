"""docs/choosing.md as a newcomer with two sites walks through it: each command in a shell, over an emulated link."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lab import Lab, Link
from tests.programs import ROOT, until
from tests.test_lab import needs_lab

pytestmark = [
    pytest.mark.shows("from a link to a model, by the commands of a page", device=False),
    pytest.mark.timeout(1200),
]

#: Flags of the page, and those of a smaller run in their place.
SMALLER = {
    "--mbit 1000 --rtt 30 --loss 0.5% --step 13s --ranks-per-site 32": "--link link.json --step 250ms --ranks-per-site 1 --config tiny/llama_1m",
    "--accelerators 32": "--accelerators 1 --train-iters 40 --lr-warmup-iters 2 --save-interval 40 --eval-iters 1 --island-patience 100",
}


def page():
    """The shell blocks of the page by the heading that they are under."""
    text = (ROOT / "docs/choosing.md").read_text()
    for long, short in SMALLER.items():
        assert long in text
        text = text.replace(long, short)
    parts = re.split(r"^## \d\. (.*)\n", text, flags=re.MULTILINE)
    return {name: re.findall(r"```sh\n(.*?)```", part, re.DOTALL) for name, part in zip(parts[1::2], parts[2::2])}


class Site:
    """A host of the lab with a name, which runs commands in a folder. Each site resolves the names of both."""

    def __init__(self, lab, number, folder):
        self._lab, self._number, self.folder, self._name = lab, number, folder, f"site{number}"
        folder.mkdir()
        hosts = [f"127.0.0.1 localhost\n{lab.address(0)} site0 HOST", f"{lab.address(1)} site1"]
        hosts[number] += " node1"
        (folder / "hosts").write_text("\n".join(hosts) + "\n")

    def start(self, text, log="log"):
        """``text`` in a shell, with the site's host name and names of hosts."""
        named = f'hostname {self._name}; mount --bind hosts /etc/hosts; exec bash -c "$0"'
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        command = ["unshare", "--uts", "--mount", "bash", "-ec", named, text]
        with open(self.folder / log, "a") as file:
            return self._lab.start(
                self._number, command, cwd=self.folder, env=environment, stdout=file, stderr=subprocess.STDOUT
            )

    def run(self, text, log="log"):
        """Return the output of ``text`` at its end."""
        before = len(self.printed(log))
        assert self.start(text, log).wait() == 0, self.printed(log)[-3000:]
        return self.printed(log)[before:]

    def printed(self, log="log"):
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / log).read_text()
        return ""


@needs_lab
@pytest.mark.slow
def test_from_a_link_to_a_model(tmp_path):
    pytest.importorskip("cryptography")
    transformers = pytest.importorskip("transformers")
    blocks = page()
    slow = Link(delay=0.02, loss=0.005, rate=20e6, queue=100_000)
    with Lab(slow) as lab:
        first, second = (Site(lab, number, tmp_path / f"site{number}") for number in range(2))

        serve, measure = blocks["Measure the link"]
        serving = first.start(serve)
        until(lambda: "waiting at port" in first.printed(), serving)
        second.run(measure)
        assert serving.wait() == 0

        [plan] = blocks["Plan"]
        assert "recommended: islands, udp" in second.run(plan)
        key, dry = blocks["Dry run"]
        first.run(key)
        (first.folder / "plan.yaml").write_text((second.folder / "plan.yaml").read_text())
        commands = re.split(r"^# .*\n", first.run(dry), flags=re.MULTILINE)[1:]
        (second.folder / "run.key").write_bytes((first.folder / "run.key").read_bytes())
        (second.folder / "run.key").chmod(0o600)
        assert re.split(r"^# .*\n", second.run(dry), flags=re.MULTILINE)[1:] == commands
        coordinator, *islands = commands

        [doctor] = blocks["Doctor"]
        trying = [site.start(doctor, "doctor") for site in (first, second)]
        assert [one.wait() for one in trying] == [0, 0] and "ready: yes" in first.printed("doctor")

        serving = first.start(coordinator, "coordinator")
        running = [site.start(command, "run") for site, command in zip((first, second), islands)]
        [watch] = blocks["Watch"]
        until(lambda: "megatron_lossy_lm_loss" in first.run(f"{watch}true", "watch"), *running, seconds=600)
        assert [one.wait() for one in running] == [0, 0], first.printed("run")[-3000:] + second.printed("run")[-3000:]
        serving.send_signal(signal.SIGTERM)
        assert serving.wait() == 0

        [export] = blocks["Export"]
        assert "iteration 40" in first.run(export)
    model = transformers.AutoModelForCausalLM.from_pretrained(first.folder / "model")
    assert model.config.num_hidden_layers == 4
