"""The pretended device itself: what a GPU would not do, it does not do either."""

import os
import subprocess
import sys

import pytest

from tests.ranks import RankFailed, run_ranks

from . import device, programs

pytestmark = pytest.mark.shows(
    "a pretended CUDA device: memory, streams, copies, generators, two devices", device=False
)

#: Ways in which a program stalls.
STALLS = {
    "item": ["synchronisation"],
    "nonzero": ["synchronisation"],
    "mask": ["synchronisation"],
    "masked fill": [],
    "masked put": ["synchronisation"],
    "host index": ["blocking copy"],
    "tensor": ["blocking copy"],
    "blocking": ["blocking copy"],
    "pageable": ["pageable copy"],
    "pinned": [],
    "event": ["synchronisation"],
    "stream": ["synchronisation"],
    "device": ["synchronisation"],
    "arithmetic": [],
}
FAULTS = {
    "ordered": [],
    "unordered": ["race"],
    "not announced": ["freed in use"],
    "waited for": [],
    "read early": ["not there yet"],
    "written early": ["page-locked memory"],
    "source kept": [],
    "source overwritten": ["page-locked memory"],
}


def _run(program, *arguments, ranks=1):
    return run_ranks(program, ranks, *arguments, grouped=False)


def test_who_follows_a_pointer_of_the_device_dies():
    with pytest.raises(RankFailed, match="the process died"):
        _run(programs.follow_pointer)


@pytest.mark.parametrize(
    ("name", "devices"), [("cpu", "cuda:0 and cpu"), ("index_select", "cuda:0 and cpu"), ("other", "cuda:0 and cuda:1")]
)
def test_devices_do_not_mix(name, devices):
    assert f"found at least two devices, {devices}" in _run(programs.error_of, name)[0]


@pytest.mark.parametrize("name", STALLS)
def test_what_the_host_waits_for_is_counted(name):
    assert _run(programs.stalls_of, name) == [STALLS[name]]


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_order(name):
    assert _run(programs.faults_of, name) == [FAULTS[name]]


def test_an_event_is_not_over_at_once():
    assert _run(programs.ask_twice) == [[False, True]]


def test_local_rank_decides_which_device():
    found = _run(programs.take_devices, ranks=2)
    assert found == [("cuda:0", "cuda:0", 3.0), ("cuda:1", "cuda:1", 3.0)]


def test_storages_are_saved_and_loaded():
    assert _run(programs.save) == [[1.0, 2.0, 3.0]]


def test_random_numbers_are_the_devices_own():
    assert _run(programs.draw) == [(True, True)]


@pytest.mark.parametrize(("visible", "devices"), [("0", "1"), ("", "0")])
def test_every_program_of_a_folder_has_it(tmp_path, visible, devices):
    device.everywhere(tmp_path)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    program = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    variables = os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": visible}
    assert subprocess.check_output([sys.executable, "-c", program], env=variables, text=True).strip() == devices
