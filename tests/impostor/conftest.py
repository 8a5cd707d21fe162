"""Rows on the pretended device, each run once for all tests of a process."""

import pytest

from megatron_lossy.lab.calibration.job import write_data

from .job import Runs


@pytest.fixture(scope="session", autouse=True)
def _compiled(pretended):
    pass


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Return the function ``runs(row, pretended=True)``, which runs rows."""
    return Runs(write_data(tmp_path_factory.mktemp("data")))
