"""``python -m megatron_lossy doctor``."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from megatron_lossy.base.errors import UsageError
from megatron_lossy.hooks.versions import SUPPORTED, check_version
from megatron_lossy.lab.doctor import network
from megatron_lossy.lab.doctor.found import apex
from megatron_lossy.transport.udp import Settings
from tests.programs import ROOT, Program, rank_environments, run_program

pytestmark = pytest.mark.shows("the doctor: this machine, a lossy step, datagrams and streams between ranks")


def doctor(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "megatron_lossy", "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_this_machine_is_ready():
    """The doctor looks for all that the tests need, and a lossy step on two processes works."""
    done = run_program("megatron_lossy", "doctor", "--json", "--step", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ready"]
    by_name = {finding["name"]: finding for finding in found["findings"]}
    for name in ("python", "torch", "FSDP2", "megatron-core", "gloo", "megatron.core"):
        assert by_name[name]["status"] == "ok"
    assert by_name["NVIDIA Apex"]["status"] in ("absent", "ok")
    step = by_name["gloo, cpu"]
    assert step["status"] == "ok" and "3 iterations on 2 processes" in step["text"]


def test_a_torch_without_places_for_exchanges_is_told(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    from megatron_lossy.lab.doctor.found import versions

    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    [finding] = [finding for finding in versions(None) if finding.name == "FSDP2"]
    assert finding.status == "absent"
    assert "has no FSDPModule.set_custom_all_gather; needs 2.9 or later; DDP works" in finding.text


def test_a_megatron_that_is_too_old_is_a_problem(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text('__version__ = "0.5.0"\n')
    done = doctor("--megatron-lm", tmp_path)
    assert done.returncode == 1 and done.stdout.endswith("ready: no\n")
    assert "PROBLEM  megatron-core             megatron-core 0.5.0: is not supported" in done.stdout
    assert f"{tmp_path} has no pretrain_gpt.py" in done.stdout
    assert "not tried, because of the problems above" in done.stdout


def test_what_megatron_lm_imports_is_one_extra(tmp_path):
    for name, text in (("core", '__version__ = "0.16.1"\n'), ("training", "import six_of_nobody\n")):
        (tmp_path / "megatron" / name).mkdir(parents=True)
        (tmp_path / "megatron" / name / "__init__.py").write_text(text)
    (tmp_path / "pretrain_gpt.py").touch()
    done = doctor("--megatron-lm", tmp_path)
    assert done.returncode == 1 and "No module named 'six_of_nobody'" in done.stdout
    assert "comes with the extra megatron-lm of this package: pip install -e '.[megatron-lm]'" in done.stdout


def test_nvidias_apex_is_told_from_pypis(tmp_path, monkeypatch):
    if "apex" in sys.modules or apex().status != "absent":
        pytest.skip("an Apex is installed")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert apex().status == "warning" and "PyPI's" in apex().text
    (tmp_path / "apex/multi_tensor_apply").mkdir()
    assert "without its CUDA extensions" in apex().text
    (tmp_path / "amp_C.py").touch()
    importlib.invalidate_caches()
    assert apex().status == "ok"


def distribution(folder, name, version):
    """Write the metadata of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_range_of_megatron_core_is_that_of_the_hooks():
    [text] = re.findall(r'"(megatron-core[^"]*)"', (ROOT / "pyproject.toml").read_text().partition("optional")[0])
    core = Requirement(text).specifier
    major, minor = SUPPORTED[1]
    for version, inside in ((f"{major}.{minor - 1}.0rc0", True), (f"{major}.{minor}.0rc0", False)):
        assert core.contains(version, prereleases=True) == inside
        if inside:
            check_version(version)
        else:
            with pytest.raises(UsageError, match="is not supported"):
                check_version(version)


@pytest.mark.parametrize(
    ("transport", "own"),
    [("udp", ["engine", "receive buffer", "packets"]), ("stream", ["streams", "congestion control"])],
)
def test_links_between_ranks_are_tried(transport, own):
    done = run_program("megatron_lossy", "doctor", "--transport", transport, "--json", ranks=3)
    assert done.returncode == 0, done.stderr
    findings = {found["name"]: found for found in json.loads(done.stdout)["findings"]}
    assert {f"rank {a} to {b}" for a in range(3) for b in range(3) if a != b} <= set(findings)
    assert findings["rank 0 to 2"]["text"].startswith("0.00 % lost, round trip ")
    assert {"exchange", *(f"rank 2, {name}" for name in own)} <= set(findings)


@pytest.mark.parametrize(
    ("address", "mtu", "status", "text"),
    [
        ("10.0.0.1", 1500, "ok", "MTU 1,500: --packet-bytes 1408 of at most 1408 in steps of 64"),
        ("10.0.0.1", 1479, "problem", "MTU 1,479: --packet-bytes 1408 must be at most 1407"),
        ("fd00::1", 1499, "problem", "MTU 1,499: --packet-bytes 1408 must be at most 1407"),
        ("10.0.0.1", 9000, "ok", "of at most 8896 in steps of 64, if all hops"),
        ("10.0.0.1", None, None, ""),
    ],
)
def test_what_the_interface_takes_is_said(monkeypatch, address, mtu, status, text):
    monkeypatch.setattr("megatron_lossy.transport.address.mtu_of", lambda _: mtu)
    engine = SimpleNamespace(address=address, datagram=1408 + 44, settings=Settings())
    found = network._packets(engine)
    assert [finding.status for finding in found] == [status] * bool(status)
    assert all(text in finding.text for finding in found)


def test_without_a_launcher_the_engine_of_this_host_is_looked_at():
    done = run_program("megatron_lossy", "doctor", "--transport", "udp")
    assert done.returncode == 0 and "start it with torchrun on every host" in done.stdout
    done = run_program("megatron_lossy", "doctor", "--transport", "udp", "--udp-interface", "none9")
    assert done.returncode == 1 and "--udp-interface none9: this host has " in done.stdout


def test_ranks_that_differ_are_told_so():
    """One line that names both, on the first rank; the others end too."""
    ranks = [
        Program("megatron_lossy", "doctor", "--transport", "udp", "--packet-bytes", size, **environment)
        for size, environment in zip((1408, 1000), rank_environments(2), strict=True)
    ]
    outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert "--packet-bytes: bytes of a unit of dense-e0-s0-c0-0 is 1408 on rank 0 and 1000 on rank 1" in outputs[0][0]
