"""Options of the test suite."""

import multiprocessing.forkserver
import os
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from megatron_lossy.base import device
from tests import ranks
from tests.coordinator import serve  # noqa: F401
from tests.features import Record
from tests.ranks import Pool, run_ranks
from tests.rooms import check_room, room_of
from tests.rows import Rows
from tests.tiers import Guard, long_files_first, markers_of

device.prepare_import()
os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a program that a signal ends prints its stacks


def pytest_addoption(parser):
    parser.addoption(
        "--megatron-lm", metavar="PATH", help="checkout of Megatron-LM core_v0.16.1 to run the plugin against"
    )
    parser.addoption("--room", metavar="ROOM", help="only tests of this room of megatron_lossy (tests/rooms.py)")
    parser.addoption(
        "--idle", action="store_true", help="list tests that are marked to start processes, and start none"
    )
    parser.addoption(
        "--record", metavar="MACHINE", help="add what passed on the accelerator of this MACHINE to tests/machines.yaml"
    )


def pytest_configure(config):
    config.pluginmanager.register(Guard(config.getoption("--idle")), "guard")
    if config.getoption("--room"):
        check_room(config.getoption("--room"))
    if config.getoption("--record"):
        config.pluginmanager.register(Record(config.getoption("--record")), "record")


def pytest_ignore_collect(collection_path, config):
    room = config.getoption("--room")
    return True if room and collection_path.is_file() and room_of(collection_path) != room else None


def pytest_make_collect_report(collector):
    """The fork server imports torch and megatron-core while pytest collects, which needs them too.

    Where no test will start ranks, it would be in the way. Not earlier: pytest captures what the server and its ranks print
    only if it starts while a file is collected.
    """
    options = collector.config.option
    if isinstance(collector, pytest.File) and not options.collectonly and "not ranks" not in options.markexpr:
        multiprocessing.forkserver.ensure_running()


def pytest_generate_tests(metafunc):
    """A test with the marker ``on_cuda`` has a twin with the marker ``cuda``, whose ranks share the CUDA devices."""
    if metafunc.definition.get_closest_marker("on_cuda"):
        if "ranks_on" not in metafunc.fixturenames:
            metafunc.fixturenames.append("ranks_on")
        cuda = pytest.param("cuda", marks=pytest.mark.cuda)
        metafunc.parametrize("ranks_on", [pytest.param("cpu", id=pytest.HIDDEN_PARAM), cuda])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Choose where the ranks of this test compute."""
    ranks.kind = "cuda" if item.get_closest_marker("cuda") else "cpu"


def pytest_itemcollected(item):
    """Mark what starts ranks or programs."""
    for name in markers_of(item):
        item.add_marker(name)


@pytest.hookimpl(trylast=True)  # once it is settled which tests will run
def pytest_collection_modifyitems(config, items):
    """Skip tests that need an absent accelerator. A run on several workers (``-n``) begins with the longest files."""
    if hasattr(config, "workerinput"):
        long_files_first(items)
    for kind in ("cuda", "hpu"):
        if device.device_type() != kind:
            for item in items:
                if item.get_closest_marker(kind):
                    item.add_marker(pytest.mark.skip(reason=f"needs a device of kind {kind}"))


@pytest.fixture(scope="session")
def megatron_lm(request):
    """The checkout given with --megatron-lm."""
    path = request.config.getoption("--megatron-lm")
    if path is None:
        pytest.skip("needs a checkout of Megatron-LM: --megatron-lm PATH")
    # The first start of each of its programs would compile this, for the python3-config of PATH.
    subprocess.run(["make", "-C", str(Path(path, "megatron/core/datasets"))], capture_output=True)
    return path


@pytest.fixture(scope="session")
def pretended():
    """The pretended CUDA device is compiled; a skip says why it cannot be."""
    from tests.impostor.build import CannotBuild, library

    try:
        library()
    except CannotBuild as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def rows():
    """One process that runs command lines one after the other."""
    with closing(Rows()) as process:
        yield process


@pytest.fixture(scope="module")
def pool():
    """Ranks that stay for the tests of a file."""
    with closing(Pool()) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def unhooked():
    """Ranks that stay, and in which no hook was ever installed."""
    with closing(Pool()) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with the data sets train and valid, of text that never changes."""
    from tests.trainer import write_data

    folder = tmp_path_factory.mktemp("data")
    run_ranks(write_data, 1, str(folder))
    return folder


@pytest.fixture(scope="module")
def data(text):
    """Settings of the trainer for this text."""
    return {"data_path": (str(text / "train"),), "valid_data_path": (str(text / "valid"),)}
