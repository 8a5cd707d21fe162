"""What a link between sites has time for, against counting, and what the documentation says of it."""

import math
import re
import shlex
from pathlib import Path

import pytest

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import __main__ as lab
from megatron_lossy.lab import theory
from megatron_lossy.lab.launch.__main__ import main as launch
from megatron_lossy.lab.studies.link import Site, fraction, read
from scripts import choosing

pytestmark = pytest.mark.shows("what a link between sites has time for", device=False)

ROOT = Path(__file__).parent.parent
EXAMPLE = ["--mbit", "1000", "--rtt", "30", "--loss", "0.005", "--parameters", "6.738e9", "--step", "13"]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_bytes_of_gradients_are_those_of_the_pieces_that_cross(ranks):
    parameters = 64
    sites = [rank // ranks for rank in range(2 * ranks)]
    crossing = sum(
        parameters / len(sites) * (4 + 2)  # the piece of an owner: gradients to it, weights from it
        for source, from_site in enumerate(sites)
        for owner, to_site in enumerate(sites)
        if (from_site, to_site) == (0, 1) and source != owner
    )
    assert theory.gradient_bytes(parameters, ranks) == crossing


@pytest.mark.parametrize("islands", [2, 3, 8])
@pytest.mark.parametrize("round_trip", [0, 0.01, 0.5, 0.9, 1, 3.2])
@pytest.mark.parametrize("rate", [1e3, 1e6, 7.7e6, 1e9])
def test_what_islands_send_fits_a_step_and_the_delay(rate, round_trip, islands):
    parameters, step = 1e6, 1.0
    n, delay = theory.parts(parameters, rate, round_trip, step, islands)

    def fits(parts: int) -> bool:
        time = theory.bytes_sent(1, islands, 2) * parameters / parts / rate
        return time <= step + 1e-9 and time + round_trip <= delay * step + 1e-9

    assert fits(n) and (n == 1 or not fits(n - 1))
    assert (delay - 1.5) * step < round_trip <= (delay - 0.5) * step + 1e-9


@pytest.mark.parametrize("n", [*range(1, 120), 500, 999, 1000, 12345])
def test_fractions_are_taken_as_meant(n):
    config = LossyConfig(islands=2, sync_method="parameters", sync_fraction=float(fraction(n)))
    assert config.parts == n


def test_a_fast_way_that_is_narrow_is_for_islands(capsys):
    """A short round trip without loss says what carries the bytes, and not that there is time for them."""
    lab.main(["link", "--mbit", "100", "--rtt", "0.5", "--parameters", "7e9", "--step", "13"])
    text = capsys.readouterr().out
    assert "129 times the step" in text and "choose     islands: " in text and "--transport" not in text


@pytest.mark.parametrize("step", [0.005, 0.01, 0.0125, 0.02, 0.2])
def test_no_exchange_waits_for_a_lane(step):
    """Four cross at once, each for a round trip at least."""
    site = read(["--mbit", "1000", "--rtt", "50", "--loss", "0.01", "--parameters", "1e6", "--step", str(step)])
    under_way = site.averaged / site.rate + 0.05
    assert under_way <= 4 * site.interval * step + 1e-9
    assert site.interval == 1 or under_way > 4 * (site.interval - 1) * step
    assert any(flag.startswith("--sync-interval") for flag in site.flags) == (site.interval > 1)


def test_the_worked_example(capsys):
    lab.main(["link", *EXAMPLE])
    text = capsys.readouterr().out
    assert "20.2 GB each way in an iteration: at least 2.7 min" in text
    assert "one parameter in 9 in each iteration, 1 late: 1.5 GB each way" in text
    chosen = re.search(r"^choose     islands: (.*)$", text, re.MULTILINE)[1]
    page = (ROOT / "docs/choosing.md").read_text()
    [command] = [block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "launch" in block]
    words = shlex.split(command.replace("\\\n", " "))
    assert all(word in words for word in chosen.split())
    assert shlex.split(page.partition("lab link")[2].partition("```")[0].replace("\\\n", " ")) == EXAMPLE


def test_the_command_of_the_example_is_accepted(capsys, monkeypatch, tmp_path):
    page = (ROOT / "docs/choosing.md").read_text()
    command = re.search(r"^python -m megatron_lossy.launch (.*?)```", page, re.DOTALL | re.MULTILINE)[1]
    config = str(ROOT / "configs/llama2_7b/cuda_dp64.yaml")
    words = shlex.split(command.replace("\\\n", " ").replace("configs/llama2_7b/cuda_dp64.yaml", config))
    monkeypatch.chdir(tmp_path)
    launch(words)
    said = capsys.readouterr().out
    assert "islands  2, each a job of 32 consecutive ranks" in said and "11.1 % of them every 1 iterations" in said


@pytest.mark.parametrize(
    ("changes", "method", "flags"),
    [
        ({}, "islands", "--sync-fraction 0.112"),
        ({"mbit": 1e5}, "gradients", "--transport udp"),
        ({"mbit": 1e5, "round_trip_ms": 0.1, "loss": 0.0}, "gradients", "--transport torch"),
        ({"mbit": 1e4}, "islands", "--sync-delay 1 --delay-correction smith"),
        ({"mbit": 1e5, "ranks": 32}, "islands", "--sync-method parameters --sync-delay 1"),
        ({"step": 1.0, "round_trip_ms": 2000}, "islands", "--sync-delay 3"),
    ],
)
def test_what_is_chosen(changes, method, flags):
    site = Site(**{"mbit": 1e3, "round_trip_ms": 30, "loss": 0.005, "parameters": 6.738e9, "step": 13, **changes})
    assert site.takes_gradients == (method == "gradients")
    assert flags in " ".join(site.flags)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (["--mbit", "0"], "--mbit 0.0: must be above 0"),
        (["--rtt", "-1"], "--rtt -1.0: must be at least 0"),
        (["--loss", "1"], "--loss 1.0: must be in"),
        (["--islands", "1"], "--islands 1: must be at least 2"),
        (["--step", "nan"], "--step nan: must be above 0"),
    ],
)
def test_wrong_links(changed, line):
    with pytest.raises(UsageError, match=re.escape(line)):
        read([*EXAMPLE, *changed])


def test_the_table_has_the_step_that_was_measured():
    assert math.isclose(choosing.ROWS[-2].site.step, 0.181)


@pytest.mark.parametrize(
    "page", ["README.md", "docs/index.md", "docs/wan.md", "docs/transport.md", "docs/cluster.md", "docs/islands.md"]
)
def test_pages_about_links_lead_to_the_choice(page):
    text = (ROOT / page).read_text()
    assert "choosing.md" in text and "island" in text
