"""The wheel and the source distribution: what is in them, and that a machine with no checkout can train."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import yaml

import megatron_lossy
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config.shipped import FOLDERS, copy_shipped, find_config
from megatron_lossy.lab.report import read_runs
from tests.test_doctor import distribution

pytestmark = pytest.mark.shows(
    "wheel and source distribution: complete, train in an empty folder",
    "a wheel without the lab trains",
    "`--no-deps` leaves the torch and the Megatron of an image alone",
    device=False,
)

ROOT = Path(__file__).parents[1]
#: Folders that are no source: hidden ones, and those that builds, tests and training leave.
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.egg-info", ".git", ".venv", ".*_cache", ".hypothesis")
BUILD = "from setuptools import build_meta; import sys; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def build(kind, source, out):
    subprocess.run([sys.executable, "-c", BUILD, kind, str(out)], cwd=source, check=True, capture_output=True)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A folder with both; the wheel is built from the source distribution, as pip does where there is no wheel."""
    pytest.importorskip("setuptools", "77")
    work = tmp_path_factory.mktemp("package")
    for entry in ROOT.iterdir():
        if entry.is_dir() and entry.name not in ("build", "dist", "runs", "data", ".git", ".venv"):
            shutil.copytree(entry, work / "source" / entry.name, ignore=LEFT_OUT)
    for entry in ROOT.iterdir():
        if entry.is_file():
            shutil.copy(entry, work / "source")
    build("build_sdist", work / "source", work)
    with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
        archive.extractall(work, filter="data")
    build("build_wheel", next(path for path in work.glob("megatron_lossy-*") if path.is_dir()), work)
    return work


def install(distributions, site):
    """Have pip install the wheel into the folder ``site``."""
    wheel = str(next(distributions.glob("*.whl")))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site), wheel]
    subprocess.run(pip, check=True)


def files_of(*folders):
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_images_have_all_that_the_package_needs_and_the_citation_its_version():
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    of_image = {"torch", "numpy", "megatron-core"}
    needed = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]} - of_image
    for name in ("Dockerfile", "Dockerfile.gaudi"):
        words = (ROOT / "docker" / name).read_text().split()
        assert needed <= set(words) and "--no-deps" in words, name
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == megatron_lossy.__version__


@pytest.mark.slow
def test_the_source_distribution_is_the_checkout(distributions):
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    folders = ["megatron_lossy", "docker", "tests", "docs", "scripts", "benchmarks", ".ci", ".github", *FOLDERS]
    files = ["Makefile", "README.md", "LICENSE", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml", "constraints.txt"]
    assert not (files_of(*folders) | set(files)) - inside


@pytest.mark.slow
def test_the_wheel_has_all_code_and_what_the_documentation_names(distributions):
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as archive:
        inside = {entry.filename: entry.external_attr >> 16 for entry in archive.infolist()}
    shipped = {f"megatron_lossy/config/shipped_files/{name}" for name in files_of(*FOLDERS)}
    assert not (files_of("megatron_lossy") | shipped) - inside.keys()
    assert all(name.startswith(("megatron_lossy/", "megatron_lossy-")) for name in inside)
    for name in ("launch/torchrun.sh", "launch/slurm/run.sbatch", "patches/check.sh"):
        assert inside[f"megatron_lossy/config/shipped_files/{name}"] & 0o100, f"{name} is not executable"


@pytest.mark.slow
def test_make_run_from_the_wheel_in_an_empty_folder(distributions, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install(distributions, site)
    nowhere = {"PATH": str(empty), "CC": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}  # no compiler is found there
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"} | nowhere

    def python(*arguments):
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    # The command of make run, at two rates and for two iterations.
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    training = ["-m", "megatron_lossy.train", "--config", "configs/tiny/llama_1m.yaml"]
    short = ["--train-iters", "2", "--lr-warmup-iters", "1", "--eval-iters", "1", "--eval-interval", "2"]
    for rate, wire in (
        ("0.00", ("--transport", "udp", "--loss-unit", "packet")),
        ("0.40", ("--transport", "pieces", "--grad-wire", "int8")),
    ):
        losses = ("--p-grad", rate, "--p-param", rate, *wire)
        python(*torchrun, *training, *losses, "--save", f"runs/tiny/p_{rate}", *short)
    assert not list(tmp_path.glob("cache/**/*.so"))
    assert "val loss" in python("megatron_lossy.report", "runs/tiny")
    assert sorted(run.name for run in read_runs(empty / "runs/tiny")) == ["p_0.00", "p_0.40"]
    assert str(site) in python("inspect", "megatron_lossy.lab", "--details")
    assert python("megatron_lossy", "copy", ".").split() == list(FOLDERS)
    assert os.access(empty / "launch/torchrun.sh", os.X_OK)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
#: An FSDP2 model, and the loss rate of its gradients.
FSDP = """
import os
import torch
from torch.distributed.fsdp import fully_shard
from megatron_lossy.config import LossyConfig
from megatron_lossy.pytorch import make_lossy

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters())
lossy = make_lossy(model, optimizer, LossyConfig(p_grad=0.3, p_param=0.3, loss_unit="packet", packet_bytes=64))
for _ in range(3):
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
rate = lossy.metrics()["loss rate grad"]
print(f"lost {rate}\\n", end="", flush=True)  # one write, which the other rank's does not split
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def without_lab(distributions):
    """Return a Python that finds the wheel without ``megatron_lossy/lab``, and its environment.

    It has the packages of this Python but not their .pth files, by which a checkout that was installed as editable is found.
    """
    site, bare = distributions / "without_lab", distributions / "bare"
    install(distributions, site)
    shutil.rmtree(site / "megatron_lossy" / "lab")
    venv.create(bare, with_pip=False)
    packages = os.pathsep.join([str(site), str(Path(pytest.__file__).parents[1])])
    return str(bare / "bin" / "python"), os.environ | {"PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}


def ran_without_lab(without_lab, folder, *arguments, status=0):
    """Return ``python arguments`` in ``folder``, which has ended with this status."""
    python, environment = without_lab
    command = [python, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stderr[-2000:]
    return done


@pytest.mark.slow
@pytest.mark.programs
def test_a_wheel_without_the_lab_trains_a_model_of_fsdp(without_lab, tmp_path):
    (tmp_path / "train.py").write_text(FSDP)
    done = ran_without_lab(without_lab, tmp_path, *TORCHRUN, "train.py")
    rates = [float(rate) for rate in re.findall(r"^lost ([0-9.]+)$", done.stdout, re.MULTILINE)]
    assert len(rates) == 2 and all(0.1 < rate < 0.5 for rate in rates)


@pytest.mark.slow
@pytest.mark.programs
def test_a_wheel_without_the_lab_says_so(without_lab, tmp_path):
    done = ran_without_lab(without_lab, tmp_path, "-m", "megatron_lossy", "doctor", status=2)
    assert "needs megatron_lossy.lab" in done.stderr.splitlines()[-1]
    for words in (["refusals"], ["copy", "here"]):
        ran_without_lab(without_lab, tmp_path, "-m", "megatron_lossy", *words)


@pytest.mark.megatron_lm
@pytest.mark.timeout(600)
def test_a_wheel_without_the_lab_trains_the_unmodified_pretrain_gpt(without_lab, tmp_path, megatron_lm):
    from tests.test_plugin_megatron_lm import MODEL

    script = Path(megatron_lm) / "pretrain_gpt.py"
    loss = ["--p-grad", "0.3", "--p-param", "0.3"]
    done = ran_without_lab(without_lab, tmp_path, *TORCHRUN, "-m", "megatron_lossy", script, *MODEL, *loss)
    assert "loss rate grad" in done.stdout and "iteration       20/" in done.stdout


@pytest.mark.slow
def test_no_deps_leaves_the_torch_and_the_megatron_of_an_image_alone(distributions, tmp_path):
    """And pip itself would keep release candidates and the alphas of images, but not an older torch."""
    venv.create(tmp_path / "image", with_pip=False)
    python, site = tmp_path / "image/bin/python", next(tmp_path.glob("image/lib/*/site-packages"))
    image = {"torch": "2.6.0a0+ecf3bae40a.nv25.01", "megatron-core": "0.20.0rc0", "packaging": "23.2"}
    image |= {"einops": "0.8.0", "numpy": "1.26.4", "psutil": "5.9.8", "pyyaml": "6.0.2"}
    image |= {"matplotlib": "3.8.0", "tensorboard": "2.16.2"}
    for name, version in image.items():
        distribution(site, name, version)
    before = sorted(site.rglob("*"))
    wheel = str(next(distributions.glob("*.whl")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull

    def pip(*arguments):
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", *arguments, wheel]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    planned = pip("--dry-run", "--quiet", "--report=-")
    assert planned.returncode == 0, planned.stderr
    assert [one["metadata"]["name"] for one in json.loads(planned.stdout)["install"]] == ["megatron-lossy"]
    assert pip("--no-deps").returncode == 0
    assert [path for path in sorted(site.rglob("*")) if "megatron_lossy" not in str(path.relative_to(site))] == before

    shutil.rmtree(next(site.glob("torch-*")))
    distribution(site, "torch", "2.5.1")
    assert "No matching distribution found for torch>=2.6.0a0" in pip("--dry-run").stderr


@pytest.mark.parametrize("name", ["configs/tiny/llama_1m.yaml", "tiny/llama_1m.yaml", "tiny/llama_1m"])
def test_a_configuration_of_the_package_is_found_by_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name).samefile(ROOT / "configs/tiny/llama_1m.yaml")


def test_a_file_that_is_there_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = Path("configs/tiny/llama_1m.yaml")
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_config(str(own)) == own
    assert find_config("configs/absent.yaml") == Path("configs/absent.yaml")
    assert find_config(tmp_path / "configs/studies/channels.yaml") == tmp_path / "configs/studies/channels.yaml"


def test_copy_replaces_nothing(tmp_path):
    assert [path.name for path in copy_shipped(tmp_path / "new")] == list(FOLDERS)
    assert (tmp_path / "new/launch/slurm/run.sbatch").read_text() == (ROOT / "launch/slurm/run.sbatch").read_text()
    (tmp_path / "half/launch").mkdir(parents=True)
    with pytest.raises(UsageError, match="launch is there already"):
        copy_shipped(tmp_path / "half")
    assert not (tmp_path / "half/configs").exists()
