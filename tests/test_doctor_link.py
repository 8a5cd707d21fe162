"""``doctor --link`` over emulated links, against the emulator's settings and counts; and strangers at its port."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.lab import Lab, Link
from megatron_lossy.base.errors import UsageError
from megatron_lossy.lab.doctor import link as doctor
from megatron_lossy.lab.plan.link import read_link
from tests.slurm_cluster import ROOT, free_ports
from tests.test_lab import needs_lab

pytestmark = pytest.mark.shows("doctor --link: rate, round trip, loss, bursts, MTU, queue within 10 %", device=False)

PORT = 29711


@contextlib.contextmanager
def serving(port, key=b""):
    """``serve`` on a thread: yields the lines that it has logged, and ends when it has served."""
    lines, errors = [], []

    def run():
        try:
            doctor.serve(port, key, lines.append)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not lines and thread.is_alive():
        time.sleep(0.001)
    yield lines
    thread.join(60)
    assert not thread.is_alive() and not errors, (lines, errors)


@pytest.fixture
def quick(monkeypatch):
    """Measurements that are short."""
    monkeypatch.setattr(doctor, "_SECONDS", 2.0)
    monkeypatch.setattr(doctor, "_TRAIN_SECONDS", 0.05)


def measured(lab, folder, there, back, *flags):
    """The file that node 0 writes of its link to node 1, and the counters of the way there."""
    lab.set(there, 0, 1)
    lab.set(back, 1, 0)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "megatron_lossy", "doctor"]
    server = lab.start(1, [*command, "--serve", str(PORT)], stdout=subprocess.PIPE, text=True, env=environment)
    assert "waiting at port" in server.stdout.readline()
    before = lab.counters(0, 1)
    out = str(folder / "link.json")
    client = lab.start(0, [*command, "--link", f"{lab.address(1)}:{PORT}", "--out", out, *flags], env=environment)
    assert client.wait(120) == 0 and server.wait(60) == 0
    server.stdout.close()
    return json.loads(Path(out).read_text()), lab.counters(0, 1).since(before)


@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "back"),
    [
        (Link(0.02, 0.01, rate=100e6, queue=250e3), Link(0.02, 0.03, rate=40e6, queue=100e3)),
        (Link(0.005, 0.04, burst=4, rate=2e7, queue=50e3, mtu=1400), Link(0.005, 0.02, rate=1e7, queue=50e3, mtu=1280)),
        (Link(0.05, 0.05, rate=200e6, queue=1e6), Link(0.05, 0.1, burst=8, rate=200e6, queue=1e6)),
    ],
    ids=["100 and 40 Mbit/s", "short packets", "bursts"],
)
def test_a_link_is_measured_within_10_percent(tmp_path, there, back):
    with Lab(Link()) as lab:
        found, counted = measured(lab, tmp_path, there, back)
    trip = 1e3 * (there.delay + back.delay)
    busy = found["rtt_spread_ms"]  # the emulated delay has none: what a busy machine adds
    assert found["rtt_least_ms"] == pytest.approx(trip, rel=0.1)
    assert found["rtt_ms"] == pytest.approx(trip, abs=0.1 * trip + busy)
    for name, link in (("there", there), ("back", back)):
        way, queue = found[name], link.queue * 8e3 / link.rate
        assert way["mbit"] == pytest.approx(link.rate / 1e6, rel=0.1) and way["mbit_is"] == "measured"
        # Four standard deviations of as many draws, where these are more than 10 %.
        burst = link.burst or 1 / (1 - link.loss)
        spread = 4 * (2 * burst * link.loss / found["probes"]) ** 0.5
        assert way["loss"] == pytest.approx(link.loss, abs=max(0.1 * link.loss, spread))
        assert way["burst"] == pytest.approx(burst, rel=max(0.1, spread / link.loss))
        assert way["mtu"] == (link.mtu or 1500)
        assert way["queue_ms"] == pytest.approx(queue, abs=0.1 * queue + busy)
    assert read_link(str(tmp_path / "link.json")).mbit == min(found["there"]["mbit"], found["back"]["mbit"])
    # A tenth at most after the trains: the link has carried a second at its rate, and that.
    assert counted.delivered_bytes <= there.rate / 8 * (1 + 0.1 * 20)


@needs_lab
def test_a_link_that_loses_all_datagrams_is_refused(tmp_path, capfd):
    with Lab(Link(mtu=90)) as lab:  # TCP opens, and longer packets vanish
        with pytest.raises(AssertionError):
            measured(lab, tmp_path, Link(mtu=90), Link(mtu=90))
        assert not (tmp_path / "link.json").exists()
    assert "--link" in capfd.readouterr().err


def test_nobody_there_is_one_line():
    with pytest.raises(UsageError, match=r"--link 127.0.0.1:\d+: Connection refused; start .* doctor --serve"):
        doctor.measure("127.0.0.1", free_ports(1)[0], b"", False, 0)


@pytest.mark.parametrize(("words", "reason"), [(b"", "sends nothing"), (b"SSH-2.0-OpenSSH_9\n", "is no doctor")])
def test_somebody_else_there_is_one_line(monkeypatch, words, reason):
    monkeypatch.setattr(doctor, "_FIRST_WORDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.listen()
        address = other.getsockname()

        def answer():
            with other.accept()[0] as caller:
                caller.sendall(words)
                caller.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(UsageError, match=f"{reason}; start"):
            doctor.measure(*address, b"", False, 0)


def test_strangers_are_sent_away_and_the_next_is_served(quick, monkeypatch):
    """One that sends nothing, one with noise, one without the key; and datagrams of strangers while another measures."""
    monkeypatch.setattr(doctor, "_FIRST_WORDS", 1.0)
    port, stop = free_ports(1)[0], threading.Event()
    with serving(port, b"secret") as lines:
        with socket.create_connection(("127.0.0.1", port)):
            pass
        with socket.create_connection(("127.0.0.1", port)) as noise:
            noise.sendall(b"\x00\xff" * 50_000 + b"\n")
        with socket.create_connection(("127.0.0.1", port)) as flood, contextlib.suppress(OSError):
            for _ in range(200):
                flood.sendall(b"x" * 1000)
        with pytest.raises(UsageError, match="start"):
            doctor.measure("127.0.0.1", port, b"guess", False, 0)

        def flood_datagrams():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                while not stop.wait(0.001):
                    stranger.sendto(os.urandom(100), ("127.0.0.1", port))

        flooding = threading.Thread(target=flood_datagrams)
        flooding.start()
        try:
            found = doctor.measure("127.0.0.1", port, b"secret", False, 0)
        finally:
            stop.set()
            flooding.join()
    assert found["there"]["loss"] == found["back"]["loss"] == 0
    assert sum("was sent away" in line for line in lines) == 4 and lines[-1].endswith("has measured the link")


def test_two_ranks_of_a_launcher_measure_the_link_between_them(quick, tmp_path, monkeypatch, capsys):
    from megatron_lossy.lab.doctor import main

    out, words = tmp_path / "link.json", ["--link", f"127.0.0.1:{free_ports(1)[0]}"]
    monkeypatch.setenv("RANK", "0")
    rank0 = threading.Thread(target=main, args=(words,))
    rank0.start()
    while "waiting" not in capsys.readouterr().out:
        time.sleep(0.001)
    monkeypatch.setenv("RANK", "1")
    assert main([*words, "--out", str(out)]) == 0
    rank0.join(60)
    assert read_link(str(out)).mtu > 1500  # that of the loopback
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(UsageError, match="is for two ranks of a launcher, and this is rank 2"):
        main(words)
