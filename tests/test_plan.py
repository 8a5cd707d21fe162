"""``python -m megatron_lossy plan``: times and bytes against counting, numbers against their records, and the launcher's word."""

import json
import math
import re
import shlex
import statistics
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import plan, theory
from megatron_lossy.lab.launch.__main__ import main as launch
from megatron_lossy.lab.launch.memory import parameters
from megatron_lossy.lab.plan.advice import fraction
from megatron_lossy.lab.plan.link import COUNT, Link, quantity, read_link
from megatron_lossy.lab.plan.ways import TRANSPORTS, WAYS, Job, Way, measured, order, predict, trips_again, use
from megatron_lossy.lab.studies.design import read_design
from scripts import ways

pytestmark = pytest.mark.shows("plans of runs over links, as the launcher takes them", device=False)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
EXAMPLE = ["--mbit", "1000", "--rtt", "30", "--loss", "0.5%", "--step", "13s", "--ranks-per-site", "32"]


def advice(*words):
    return plan.planned([str(word) for word in words])[1]


# --- the closed forms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_bytes_of_gradients_are_those_of_the_pieces_that_cross(ranks, number):
    parameters = 64
    sites = [rank // ranks for rank in range(number * ranks)]
    crossing = sum(
        parameters / len(sites) * (4 + 2)  # the piece of an owner: gradients to it, weights from it
        for from_site in sites
        for to_site in sites
        if from_site == 0 and to_site != 0
    )
    assert theory.gradient_bytes(parameters, ranks, sites=number) == pytest.approx(crossing, rel=1e-12)


@pytest.mark.parametrize("islands", [2, 3, 8])
@pytest.mark.parametrize("round_trip", [0, 0.01, 0.5, 0.9, 1, 3.2])
@pytest.mark.parametrize("rate", [1e3, 1e6, 7.7e6, 1e9])
@pytest.mark.parametrize("later", [0, 1, 5])
def test_what_islands_send_fits_a_step_and_the_delay(rate, round_trip, islands, later):
    parameters, step = 1e6, 1.0
    n, delay = theory.parts(parameters, rate, round_trip, step, islands, later=later)

    def fits(parts: int) -> bool:
        time = theory.bytes_sent(1, islands, 2) * parameters / parts / rate
        return time <= step + 1e-9 and time + round_trip <= delay * step + 1e-9

    assert fits(n) and (n == 1 or not fits(n - 1))
    assert (delay - later - 1.5) * step < round_trip <= (delay - later - 0.5) * step + 1e-9


@pytest.mark.parametrize("n", [*range(2, 120), 500, 999, 1000, 12345])
def test_fractions_are_taken_as_meant(n):
    config = LossyConfig(islands=2, sync_method="parameters", sync_fraction=fraction(n))
    assert config.parts == n


@pytest.mark.parametrize("step", [0.005, 0.01, 0.0125, 0.02, 0.2])
@pytest.mark.parametrize("way", [way for way in WAYS if way.method == "islands"], ids=str)
def test_no_exchange_of_islands_waits_for_a_lane_or_for_its_bytes(way, step):
    """Four cross at once, each for a round trip at least; and the least rate that was measured has time for all bytes."""
    link = Link(1000, 0.05, 0.01)
    found = predict(way, link, Job(1e6, 2, (step,) * 3, 2, 1, 1))
    slowest = link.rate * min(0.9, use(way.transport, link)[0])
    message = found.sent * found.interval
    assert message / slowest <= found.interval * step + 1e-9
    assert message / slowest + link.rtt <= 4 * found.interval * step + 1e-9
    assert message / slowest + link.rtt <= found.delay * step + 1e-9


def test_times_of_gradients_and_sites_are_those_of_their_bytes_at_the_measured_shares():
    link, job = Link(100, 0.05, 0.01, spread=0.01), Job(1e6, 4, (1.0, 2.0, 3.0), 2, 4, 4)
    sites, flat = (predict(Way(method, "udp"), link, job) for method in ("sites", "gradients"))
    assert sites.sent == pytest.approx(1e6 * (4 + 4) / 2 * 1480 / 1408) and flat.sent == pytest.approx(4 * sites.sent)
    row = next(row for row in measured()["use"]["udp"]["rows"] if row["loss"] == 0.01)
    slow, fast = (sites.sent / (100e6 / 8 * row[end]) for end in ("low", "high"))
    assert sites.seconds[0] == pytest.approx(1 + fast + 2 * 0.05)
    assert sites.seconds[2] == pytest.approx(3 + slow + 2 * 0.06)
    codes = predict(Way("sites", "udp", "int8"), link, job)
    assert codes.sent == pytest.approx(sites.sent / 4 * (1 + 2 / 128))


def test_between_two_measured_rates_of_loss_both_count_and_beyond_them_nothing():
    udp = {row["loss"]: row for row in measured()["use"]["udp"]["rows"]}
    assert use("udp", Link(1, 0, 0.03)) == (udp[0.01]["low"], udp[0.01]["high"])
    assert use("udp", Link(1, 0, 0.07)) == (udp[0.1]["low"], udp[0.05]["high"])
    assert use("udp", Link(1, 0, 0.1)) == (udp[0.1]["low"], udp[0.1]["high"])
    assert use("udp", Link(1, 0, 0.3)) is None


# --- the numbers -----------------------------------------------------------------------------------------------------


def rows_of(record):
    """The first row of each name in the tables of a record: {row: {column: cell}}."""
    found, heads = {}, []
    for line in (RESULTS / record).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
        else:
            found.setdefault(cells[0], dict(zip(heads, cells)))
    return found


def test_shares_of_a_link_are_those_of_the_records():
    for content in measured()["use"].values():
        for row in content["rows"]:
            table, column = rows_of(row.get("record", content["record"])), row.get("column", content["column"])
            if isinstance(row["row"], list):  # the ideal time over the measured one
                found = [float(table[one]["ideal"]) / float(table[one][column].split()[0]) for one in row["row"]]
            else:
                numbers = table[row["row"]][column].partition("(")[0]
                shares = "cells" in column  # not percent
                found = [float(number) / (1 if shares else 100) for number in re.findall(r"[\d.]+", numbers)]
            assert (row["low"], row["high"]) == pytest.approx((found[0], found[-1]), abs=6e-4), row


def test_the_price_of_islands_besides_computing_is_that_of_the_record():
    beside = measured()["beside"]
    table = rows_of(beside["record"])
    ours, alone = (float(table[name]["ms per iteration"]) for name in beside["rows"])
    assert beside["value"] == pytest.approx(ours / alone, abs=5e-4)


def test_a_reliable_exchange_takes_a_round_trip_more_for_each_time_that_something_is_sent_again():
    """A hundredth of 10,000 packets is lost, then a hundredth of that, and then one that is there after a third time."""
    lossy, clean = Link(1000, 0.1, 0.01), Link(1000, 0.1)
    assert trips_again("stream", lossy, 10_000 * 1448) == pytest.approx(2)
    assert trips_again("udp", lossy, 1e7) == trips_again("torch", clean, 1e7) == 0
    assert trips_again("torch", Link(1000, 0.1, 1e-6), 1448 * 100) == pytest.approx(1e-4)
    job = Job(1e6, 4, (1.0, 1.0, 1.0), 2, 1, 1)
    added = (
        predict(Way("sites", "stream"), lossy, job).seconds[0] - predict(Way("sites", "stream"), clean, job).seconds[0]
    )
    assert added == pytest.approx(2 * 0.1 * trips_again("stream", lossy, 1e6 * 4 / 2), abs=0.02)


def test_the_figure_of_ways_has_the_bytes_of_the_plan():
    study = read_design(ROOT / "configs/studies/ways.yaml", "ways_1m").study()
    trials = {trial.level: trial for trial in study.trials}
    link, size = Link(1e9, 0, 0.01), parameters(trials[None].cell.train, ways.VOCABULARY)
    there = {
        None: Way("gradients", "udp"),
        "sites, 1 %": Way("sites", "udp"),
        "sites, int8": Way("sites", "udp", "int8"),
    }
    there["diloco, every 20"] = Way("diloco", "udp", "fp32", every=20)
    for level, way in there.items():
        payload = predict(way, link, Job(size, 4, (1.0,) * 3, 2, ways.RANKS, ways.RANKS)).sent / TRANSPORTS["udp"]
        assert ways.sent(trials[level]) * 512 == pytest.approx(payload, rel=1e-12), level


# --- the advice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name", "flags"),
    [
        ((), "islands, udp, 1/7, 1 late, int8", "--sync-fraction 0.142857143"),
        (("--mbit", 1e5), "sites, udp", "--sites 2 --transport udp --udp-rate 90000000kbit"),
        (("--mbit", 1e5, "--ranks-per-site", 8, "--tp", 8), "gradients, udp", "--udp-rate 11250000kbit"),
        (("--mbit", 1e5, "--rtt", 0.1, "--loss", 0), "sites, torch", "--sites 2 --transport torch"),
        (("--mbit", 3e4), "sites, udp, int8", "--grad-wire int8 --param-wire int8"),
        (("--step", "1s", "--rtt", 2000), "islands, udp, 1/87, 3 late, int8", "--sync-delay 3"),
        (("--ranks-per-site", 64, "--tp", 8), "islands, udp, 1/7, 1 late, int8", "--transport udp"),
    ],
)
def test_what_is_recommended(words, name, flags):
    found = advice(*EXAMPLE, *words)
    assert found.options[0].found.name == name
    assert flags in found.options[0].flags
    places = [order(one.found) for one in found.options[1:]]
    assert places == sorted(places)


def test_a_way_that_nobody_has_measured_is_recommended_with_a_warning():
    text = "\n".join(plan.report(advice(*EXAMPLE)))
    assert re.search(r"nobody has measured what this costs .* [+-][\d.]+ % \([+-][\d.]+ to [+-][\d.]+; ", text)
    clean = advice(*EXAMPLE, "--mbit", 1e5, "--rtt", 0.1, "--loss", 0, "--config", "tiny/llama_1m")
    assert "what this costs" not in "\n".join(plan.report(clean))


def test_costs_of_accelerators_and_of_bytes():
    found = advice(*EXAMPLE)
    first = found.options[0].found
    lines = plan.report(found, gpus_cost=2.0, egress_cost=0.05)
    iterations = found.tokens / found.iteration_tokens
    price = iterations * (64 * first.seconds[1] / 3600 * 2 + 2 * first.sent / 1e9 * 0.05)
    assert f"  {price:,.0f}  " in next(line for line in lines if line.startswith(first.name))


@pytest.mark.parametrize("number", ["1M", "30M", "160M", "1.3B", "7B", "13B", "70B"])
def test_a_model_of_about_the_size_that_is_asked_for(number):
    config = "tiny/llama_1m" if number.endswith("M") else "llama2_7b/cuda_dp64"
    found = advice(*EXAMPLE, "--parameters", number, "--config", config, "--device", "cpu")
    assert abs(math.log(found.job.parameters / quantity("", number, COUNT))) < 0.1


def test_a_file_of_the_doctor_and_metrics_are_read(tmp_path):
    way = {"mbit": 200.0, "loss": 0.001, "burst": 1.0, "mtu": 1500}
    content = {
        "rtt_ms": 40.0,
        "rtt_spread_ms": 2.0,
        "there": way,
        "back": {"mbit": 90.0, "loss": 0.01, "burst": 1.2, "mtu": 1400},
    }
    (tmp_path / "link.json").write_text(json.dumps(content))
    assert read_link(str(tmp_path / "link.json")) == Link(90.0, 0.04, 0.01, 0.002, 1.2, 1400)
    times = [9.0, 1.0, 1.1, 1.2, 1.3, 1.4]  # the first begins, and does not count
    records = [{"kind": "run"}, *({"kind": "train", "seconds": time} for time in times)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = advice("--link", tmp_path / "link.json", "--metrics", tmp_path / "metrics.jsonl")
    assert "--packet-bytes 1280" in found.options[0].flags
    assert found.job.step == tuple(statistics.quantiles(times[1:], n=4))


LINKS = st.fixed_dictionaries(
    {
        "--mbit": st.floats(-1, 6).map(lambda power: f"{10**power:.4g}"),
        "--rtt": st.sampled_from([0, 0.1, 1, 20, 50, 150, 600]) | st.floats(0, 1000).map(lambda ms: f"{ms:.4g}"),
        "--loss": st.sampled_from(["0", "0.1%", "1%", "0.05", "10%"]) | st.floats(0, 0.6).map(lambda p: f"{p:.4g}"),
        "--step": st.floats(-3, 2).map(lambda power: f"{10**power:.4g}s"),
        "--sites": st.integers(2, 5),
        "--device": st.sampled_from(["cpu", "h100", "a100-40gb", "b200"]),
    }
)
MODELS = st.fixed_dictionaries(
    {
        "--parameters": st.floats(6, 11.3).map(lambda power: f"{10**power:.3g}"),
        "--config": st.sampled_from(["tiny/llama_1m", "llama2_7b/cuda_dp64", "llama_2b_public/cuda_dp64"]),
        "--tp": st.sampled_from([1, 1, 2, 4, 8]),
        "--pp": st.sampled_from([1, 1, 2, 3, 4]),
        "more": st.integers(1, 12),
    }
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(link=LINKS, model=MODELS)
def test_the_launcher_takes_what_is_recommended(tmp_path, link, model):
    ranks = model["--tp"] * model["--pp"] * model["more"]
    flags = link | {name: value for name, value in model.items() if name != "more"} | {"--ranks-per-site": ranks}
    words = [str(word) for pair in flags.items() for word in pair]
    try:
        found = advice(*words)
    except UsageError:
        return  # no way fits, by the launcher's reason
    best = found.options[0]
    if best.settings.get("transport") == "udp":
        senders = 1 if "sites" in best.settings else ranks
        rate = float(best.settings["udp-rate"].removesuffix("kbit"))
        assert senders * (rate - 1) <= 900 * found.link.mbit
    found.write(tmp_path / "plan.yaml", "plan")
    own = ["--program", "train", "--data", "stdlib", "--tokenizer", "byte", "--rdzv-endpoint", "host:1"]
    status = None
    try:
        launch(["--config", str(tmp_path / "plan.yaml"), *own, "--out", str(tmp_path), "--dry-run"])
    except SystemExit as end:
        status = end.code
    assert not status, (words, best.flags)


def test_the_page_shows_what_the_plan_says(tmp_path, monkeypatch, capsys):
    """The commands of docs/choosing.md are those of one example, and the launcher takes the file that the plan writes."""
    page = (ROOT / "docs/choosing.md").read_text()
    blocks = [shlex.split(block.replace("\\\n", " ")) for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL)]
    [words] = [
        block for block in blocks if block[:4] == ["python", "-m", "megatron_lossy", "plan"] and "--mbit" in block
    ]
    monkeypatch.chdir(tmp_path)
    plan.main(words[4:])
    text = capsys.readouterr().out
    [shown] = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    for line in shown.splitlines():
        assert line.strip(" …") in text, line
    Path("run.key").write_bytes(bytes(32))
    [command] = [block for block in blocks if "megatron_lossy.launch" in block and "--dry-run" in block]
    with pytest.raises(SystemExit, match="0"):
        launch(command[command.index("megatron_lossy.launch") + 1 :])
    printed = capsys.readouterr().out
    assert "ranks    64 on 4 nodes for each island" in printed and "--config plan.yaml" in printed
