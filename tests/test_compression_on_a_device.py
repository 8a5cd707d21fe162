"""Codes of tensors on a pretended CUDA device: a CPU's bits, no race between streams, and no wait of the thread that computes."""

import pytest

from tests.test_udp_on_a_device import LITTLE, on_a_device

pytestmark = [
    pytest.mark.shows("codes on a pretended device: a CPU's bits, and no wait"),
    pytest.mark.usefixtures("pretended"),
]

CODED = {"packet_bytes": 68, "wire_block": 64, "grad_wire": "int8", "param_wire": "int8"}


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"grad_wire": "int4", "param_wire": "raw", "grad_recovery": "previous"},
        {"transport": "pieces", "grad_recovery": "renormalize-remote"},
        LITTLE,
    ],
    ids=["udp", "int4 alone", "pieces", "windows"],
)
def test_codes_of_a_device_are_those_of_a_cpu(flags):
    for equal, faults, counts, _ in on_a_device(2, **CODED | flags):
        assert equal and not faults, faults
        here = {kind: count for (kind, aside), count in counts.items() if kind == "synchronisation" and not aside}
        assert not here, counts
