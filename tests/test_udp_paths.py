"""Memory of paths: processes of one job on one host send to another host as one sender."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

import numpy as np
import pytest

from megatron_lossy.transport.udp.engine import SECOND, Engine, load
from megatron_lossy.transport.udp.paths import Paths, job_name
from megatron_lossy.transport.udp.settings import UdpSettings
from tests.udp_world import Node, World

pytestmark = pytest.mark.shows("rates beside other flows: processes of one host are one sender", device=False)

JOB = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def paths(folder, job="job", own="10.0.0.1", size=64, said=None):
    return Paths(job, own, size, (said if said is not None else []).append, folder)


def test_a_job_is_known_by_where_its_ranks_meet():
    assert job_name({}) is None
    assert job_name(JOB) == job_name({**JOB, "RANK": "3", "LOCAL_RANK": "1"})
    others = [
        {**JOB, "MASTER_PORT": "29501"},
        {**JOB, "TORCHELASTIC_RESTART_COUNT": "1"},
        {**JOB, "SLURM_STEP_ID": "2"},
    ]
    assert len({job_name(one) for one in (JOB, *others)}) == 4


def test_processes_of_a_job_share_the_memory_of_a_path(tmp_path):
    made = []
    first, second = paths(tmp_path), paths(tmp_path)
    places = [one.to("10.0.0.2", made.append) for one in (first, second)]
    assert made == places and places[0] != places[1]  # each process has it at a place of its own
    ctypes.memmove(places[0], b"seen by both", 12)
    assert ctypes.string_at(places[1], 12) == b"seen by both"
    assert first.to("10.0.0.2", made.append) == places[0] and len(made) == 2
    others = [paths(tmp_path, job="another"), paths(tmp_path, own="10.0.0.3"), paths(tmp_path)]
    for one, other in zip(others, ("10.0.0.2", "10.0.0.2", "10.0.0.4")):
        assert ctypes.string_at(one.to(other, made.append), 12) == bytes(12)
    for one in (first, second, *others):
        one.close()
    assert not os.listdir(tmp_path)


def test_only_its_owner_may_read_it(tmp_path):
    here = paths(tmp_path)
    here.to("10.0.0.2", lambda _: None)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    here.close()


@pytest.mark.parametrize("wrong", ["link", "folder", "missing"])
def test_memory_that_cannot_be_shared_is_said_and_does_without(wrong, tmp_path):
    here = paths(tmp_path)
    here.to("10.0.0.2", lambda _: None)
    (file,) = tmp_path.iterdir()
    here.close()
    folder, said = tmp_path, []
    if wrong == "link":
        file.symlink_to(tmp_path / "elsewhere")
    elif wrong == "folder":
        file.mkdir()
    else:
        folder = tmp_path / "missing"
    alone = paths(folder, said=said)
    assert alone.to("10.0.0.2", lambda _: None)
    (line,) = said
    assert file.name in line and "each process of this host sends as a sender of its own" in line
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_left_of_an_earlier_run_is_not_believed():
    lib = load()
    with_node = Node(rank=0, size=2, buckets={}, packet=1408, rate=1e9, rule="shared")
    memory = ctypes.create_string_buffer(lib.ml_path_bytes())
    place = ctypes.addressof(memory)

    def looked_at(now):
        lib.ml_path(place, with_node.engine, now)
        return memory.raw

    made = looked_at(SECOND)
    ctypes.memset(place + len(memory) - 1, 7, 1)  # something that its users wrote
    assert looked_at(12 * SECOND)[-1] == 7  # they may still have it: only the rate begins again
    ctypes.memset(place, 1, 1)  # of another version
    assert looked_at(13 * SECOND)[-1] == 0
    assert made[-1] == 0
    with_node.close()


def test_a_process_that_opens_a_path_after_a_rest_does_not_hold_up_the_others():
    """Ranks 1 and 2 are on one host. Rank 1 has sent, all rest, and the process of rank 2 opens the path anew."""
    unit, lib = 1408, load()
    memory = ctypes.create_string_buffer(lib.ml_path_bytes())
    buckets = {"grad": [(300 * unit, unit)], "param": []}
    nodes = [Node(rank, 3, buckets, packet=unit, rule="shared", path=memory, rate=1e8) for rank in range(3)]
    data = np.ones((3, 300 * unit), np.uint8)
    with World(3, buckets, nodes=nodes) as world:
        for step in range(1, 5):
            exchange = nodes[0].post(world.now, "grad", step, 0, sources=[1])
            nodes[1].send("grad", step, 0, data)
            world.run(lambda exchange=exchange: exchange.over_at is not None)
            assert exchange.arrived[1].all()
            world.run_for(11 * SECOND)
            assert lib.ml_path(ctypes.addressof(memory), nodes[2].engine, world.now) == 0


def test_a_file_system_that_is_full_is_said_and_does_without(tmp_path, monkeypatch):
    """A page that is touched when there is no room for it would kill the process."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    said = []
    assert paths(tmp_path, said=said).to("10.0.0.2", lambda _: None)
    assert "No space left on device; each process of this host sends as a sender of its own" in said[0]


def test_a_lock_that_another_process_keeps_is_said_and_does_without(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_lossy.transport.udp.paths._LOCKED", 0.1)
    here = paths(tmp_path)
    here.to("10.0.0.2", lambda _: None)
    (file,) = tmp_path.iterdir()
    said = []
    with file.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert paths(tmp_path, said=said).to("10.0.0.2", lambda _: None)
    assert "another process has locked it for 0.1 s" in said[0]
    stuck = paths(tmp_path, said=said).to("10.0.0.2", lambda _: errno.ETIMEDOUT if len(said) == 1 else 0)
    assert stuck and os.strerror(errno.ETIMEDOUT) in said[1]
    here.close()


def test_engines_remove_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_lossy.transport.udp.paths.SHARED_MEMORY", tmp_path)
    engine = Engine(UdpSettings(rate_control="shared"), "127.0.0.1", lambda line: None, job="job")
    assert engine.path_to("127.0.0.2") and len(os.listdir(tmp_path)) == 1
    engine.close(0.0)
    assert not os.listdir(tmp_path)
    dedicated = Engine(UdpSettings(rate_control="dedicated"), "127.0.0.1", lambda line: None, job="job")
    assert dedicated.path_to("127.0.0.2") is None
    dedicated.close(0.0)
