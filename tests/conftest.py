"""Options of the test suite."""

import multiprocessing.forkserver

import pytest

from megatron_lossy import device
from tests import ranks  # noqa: F401  says what the fork server imports

device.prepare_import()


def pytest_addoption(parser):
    parser.addoption(
        "--megatron-lm", metavar="PATH", help="checkout of Megatron-LM core_v0.16.1 to run the plugin against"
    )


def pytest_make_collect_report(collector):
    """The fork server imports torch and megatron-core while pytest collects, which needs them too.

    Not earlier: pytest captures what the server and its ranks print only if it starts while a file is collected.
    """
    if isinstance(collector, pytest.File) and not collector.config.option.collectonly:
        multiprocessing.forkserver.ensure_running()


def pytest_collection_modifyitems(items):
    """Skip what needs an accelerator that is not there."""
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
    return path
