"""``--packet-bytes auto``: ranks agree on the longest packets that all paths carry, and the run is one with that number."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab import Lab, Link
from megatron_lossy import transport
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.transport import UDP_PACKET_BYTES, UDP_PACKETS
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from megatron_lossy.transport.udp import packet_size
from megatron_lossy.transport.udp.packet_size import candidates, longest
from tests.programs import ROOT, run_program
from tests.test_lab import needs_lab
from tests.trainer import TINY, as_flags, read_records

pytestmark = pytest.mark.shows("datagrams: packets as long as all paths carry", device=False)

AUTO = {"transport": "udp", "packet_bytes": "auto"}
#: Header and tag of a datagram, and those of UDP and IP.
HEADERS = {4: 28 + 16 + 28, 6: 28 + 16 + 48}


@given(mtu=st.integers(68, 70_000), version=st.sampled_from([4, 6]))
def test_what_is_tried_fits_the_interface_and_is_as_long_as_that_takes(mtu, version):
    least, most = UDP_PACKETS
    lengths = candidates(mtu, HEADERS[version])
    assert lengths == sorted(set(lengths)) and all(n % 64 == 0 and least <= n <= most for n in lengths)
    fits = (mtu - HEADERS[version]) // 64 * 64
    assert lengths[-1] == min(max(fits, least), most)


@given(mtu=st.integers(600, 9500), most=st.integers(0, 9500))
def test_the_longest_that_passes_is_found_by_halves(mtu, most):
    lengths, tried = candidates(mtu, HEADERS[4]), []
    taken = longest(lengths, lambda length: tried.append(length) or length <= most)
    carried = [n for n in lengths if n <= most]
    assert taken == (carried[-1] if carried else max(n for n in lengths if n <= UDP_PACKET_BYTES))
    assert tried[0] == lengths[-1] and len(tried) == len(set(tried)) <= 6


def test_a_loop_of_ones_own_has_to_settle_it():
    with pytest.raises(
        UsageError, match=r"--packet-bytes auto: ranks have to agree .* megatron_lossy.transport.settled"
    ):
        transport.wire_for(LossyConfig(**AUTO), [], {}, range(2), 0, None, None, None)


def test_what_depends_on_the_number_is_worked_out_when_it_is_known(monkeypatch):
    monkeypatch.setattr(packet_size, "agreed", lambda _: 1152)
    assert transport.settled(LossyConfig(**AUTO)) == LossyConfig(transport="udp", packet_bytes=1152)


def agree(lab, nodes):
    """The statuses with which the doctors of ranks on ``nodes`` end, and what they say."""
    common = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": lab.address(0), "MASTER_PORT": "29500"}
    common |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lab0"}
    words = ["-m", "megatron_lossy", "doctor", "--transport=udp", "--udp-interface=lab0", "--packet-bytes=auto"]
    ranks = [
        lab.start(
            node,
            [sys.executable, *words],
            cwd=ROOT,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(nodes[:rank].count(node))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, node in enumerate(nodes)
    ]
    said = "".join(rank.communicate(timeout=150)[0] for rank in ranks)
    return [rank.returncode for rank in ranks], said


@pytest.mark.parametrize(("mtu", "taken"), [(9000, 8896), (1500, 1408), (1280, 1152)])
@needs_lab
def test_interfaces_of_two_hosts(mtu, taken):
    with Lab(None, mtu=9000) as lab:
        lab.nodes[1].ip(f"link set lab0 mtu {mtu}")
        ended, said = agree(lab, [0, 0, 1])  # two ranks on one of them
    assert ended == [0] * 3 and said.count(" 0.00 % lost") == 6, said
    assert said.count(f"udp: --packet-bytes auto takes {taken}: the least MTU of the interfaces is {mtu:,}\n") == 1


@needs_lab
def test_a_tunnel_between_jumbo_frames_that_loses():
    """Packets that are too long vanish without a word, and so does a tenth of the others; one direction is enough."""
    with Lab(Link(delay=0.005, loss=0.1), mtu=9000) as lab:
        lab.set(Link(delay=0.005, loss=0.1, mtu=1480), 0, 1)
        ended, said = agree(lab, [0, 1])
    assert ended == [0] * 2, said
    [line] = [line for line in said.splitlines() if "takes 1408" in line]
    assert re.search(r"rank 1 of packets \(10.77.0.2:.*\) does not get UDP datagrams of [\d,]+ bytes from rank 0", line)


@needs_lab
def test_hosts_that_no_datagram_reaches_are_named_as_ever():
    with Lab(Link(mtu=400), mtu=1500) as lab:
        lab.sysctl("net.ipv4.tcp_mtu_probing", 2)
        lab.sysctl("net.ipv4.tcp_base_mss", 256)
        for node in lab.nodes:
            node.ip(f"route change 10.77.0.0/24 dev lab0 src {node.address} advmss 256")
        ended, said = agree(lab, [0, 1])
    assert any(ended) and "does not get UDP datagrams of 1,452 bytes from rank" in said, said


def under_torchrun(module, *arguments, ranks):
    """As :func:`run_program`, with ``ranks`` under torchrun."""
    launcher = ["--standalone", "--nproc-per-node", ranks, "-m", module]
    return run_program("torch.distributed.run", *launcher, *arguments)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run_program, marks=pytest.mark.programs, id="a store of rank 0"),
        pytest.param(under_torchrun, marks=pytest.mark.slow, id="a store of torchrun"),
    ],
)
def test_a_run_is_one_with_the_number(run, data, tmp_path):
    """Its description, its log, its folder and its replay have the number; with another one it does not go on."""
    udp = {"transport": "udp", "p_grad": 0.3, "p_param": 0.3, "delivery_log": str(tmp_path / "log")}
    folders = {name: str(tmp_path / "run") for name in ("save", "metrics_dir")} | {"save_interval": 8}

    def train(loss, **more):
        words = as_flags(TINY | data | {"train_iters": 8} | more | loss)
        return run("megatron_lossy.train", *words, ranks=2)

    first = train(udp | {"packet_bytes": "auto"}, **folders)
    assert first.returncode == 0, first.stderr
    assert "packet of 8896 bytes" in first.stdout and "udp: --packet-bytes auto takes 8896: " in first.stderr
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["loss"]["packet_bytes"] == 8896
    assert {file.meta.config.packet_bytes for file in DeliveryLogFolder(tmp_path / "log").files} == {8896}

    trace = {"loss_model": ("trace",), "trace": str(tmp_path / "log"), "transport": "pieces", "loss_unit": "packet"}
    again = train(trace | {"packet_bytes": 8896}, metrics_dir=str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    losses = [
        [(record["lm loss"], record["grad norm"]) for record in read_records(tmp_path / name, "train")]
        for name in ("run", "again")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    refused = {
        "--packet-bytes auto: needs --transport udp; with others, as in a replay of its log, give the number": train(
            trace | {"packet_bytes": "auto"}, metrics_dir=str(tmp_path / "none")
        ),
        f"--packet-bytes 1408: the run recorded in --trace {tmp_path}/log had 8896": train(
            trace | {"packet_bytes": 1408}, metrics_dir=str(tmp_path / "none")
        ),
        "--packet-bytes was 8896 there and is 1408 here": train(udp, **folders, load=folders["save"]),
        "holds a run with these settings; --load it as well to continue": train(
            udp | {"packet_bytes": "auto"}, **folders
        ),
    }
    for text, done in refused.items():
        assert done.returncode and text in done.stderr, done.stderr


def test_who_has_a_number_where_others_have_auto_is_told_so(monkeypatch):
    monkeypatch.setattr(packet_size, "_meeting", lambda: (dist.HashStore(), "", 0, 2))
    monkeypatch.setattr(packet_size, "_TOGETHER", timedelta(seconds=1))
    why = "--packet-bytes auto: not all ranks came to agree within 1 s: all must have it, or the same number"
    with pytest.raises(UsageError, match=why):
        packet_size._agree(LossyConfig(**AUTO))
