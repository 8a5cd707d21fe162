"""Options of the test suite."""

import pytest

from megatron_lossy import device

device.prepare_import()


def pytest_addoption(parser):
    parser.addoption("--megatron-lm", metavar="PATH", help="checkout of Megatron-LM core_v0.16.1 to run the plugin against")


@pytest.fixture(scope="session")
def megatron_lm(request):
    """The checkout given with --megatron-lm."""
    path = request.config.getoption("--megatron-lm")
    if path is None:
        pytest.skip("needs a checkout of Megatron-LM: --megatron-lm PATH")
    return path
