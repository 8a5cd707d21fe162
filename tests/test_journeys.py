"""Files to read to follow an exchange, counted on real ranks: every call, the smallest property too.

The numbers are ceilings. A change that shortens a way lowers them; one that makes it longer says why.
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer
from torch.distributed.fsdp import fully_shard

import megatron_lossy
from megatron_lossy import hooks
from megatron_lossy.config import LossyConfig
from megatron_lossy.plugin import parse_loss_flags
from megatron_lossy.pytorch import exchanges, make_lossy
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_reduce_scatter
from tests.ranks import run_ranks
from tests.tiny_gpt import TinyGPT, build
from tests.vectors import rounds_of

pytestmark = pytest.mark.shows("an exchange passes few files", device=False)

PACKAGE = str(Path(megatron_lossy.__file__).parent)


class Journey:
    """Within its context the calls of functions of the package are noted, on this thread. ``files``: theirs, in order."""

    def __init__(self):
        self.files = []

    def __enter__(self):
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            self.files.append(name.removeprefix(PACKAGE + "/"))

    def wrap(self, function):
        """``function``, whose first call is noted and no other."""

        def noted(*args, **kwargs):
            if self.files:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return noted


PACKETS = {"p_grad": 0.3, "p_param": 0.3, "loss_unit": "packet", "packet_bytes": 256}
#: By what crosses: the most files, and the most changes of file.
CEILINGS = {
    "a gradient bucket": (9, 17),
    "a parameter broadcast": (8, 19),
    "a gradient bucket of FSDP2": (10, 22),
    "a gather of FSDP2": (7, 22),
    "a gradient bucket over datagrams": (11, 39),
    "an exchange between islands": (10, 31),
    "two flags, read and checked": (12, 58),
}


def under_megatron(rank):
    """The reduction and the gather of the first bucket group in the second iteration."""
    hooks.install(LossyConfig(**PACKETS))
    run = build(TinyGPT())
    run.step(0)
    grads, params = Journey(), Journey()
    group = param_and_grad_buffer._ParamAndGradBucketGroup
    group.start_grad_sync = grads.wrap(group.start_grad_sync)
    group.start_param_sync = params.wrap(group.start_param_sync)
    run.step(1)
    return {"a gradient bucket": grads.files, "a parameter broadcast": params.files}


def under_fsdp2(rank):
    """The reduction of the second layer and the gather of the first one in the third step."""
    model = torch.nn.Sequential(*(fully_shard(torch.nn.Linear(40, 40)) for _ in range(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_lossy(fully_shard(model), optimizer, LossyConfig(**PACKETS))
    grads, params = Journey(), Journey()
    for step in range(3):
        if step == 2:
            exchanges.Reduce.__call__ = grads.wrap(exchanges.Reduce.__call__)
            exchanges.Gather.__call__ = params.wrap(exchanges.Gather.__call__)
        model(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"a gradient bucket of FSDP2": grads.files, "a gather of FSDP2": params.files}


def over_datagrams(rank):
    group = LossyGroup.create(LossyConfig(transport="udp", packet_bytes=256), [BucketSpec(1000)])
    output, journey = torch.empty(1000), Journey()
    for step in range(2):
        lossy_reduce_scatter(group, 0, output, torch.ones(2000), step)
    with journey:
        lossy_reduce_scatter(group, 0, output, torch.ones(2000), 2)
    group.close()
    return {"a gradient bucket over datagrams": journey.files}


def between_islands(rank):
    config = LossyConfig(islands=2, sync_method="parameters", sync_delay=1, p_sync=0.2, loss_unit="bucket")
    rounds = rounds_of(config, torch.randn(2, 50))
    for step in range(2):
        rounds.after_iteration(step)
    with Journey() as journey:
        rounds.after_iteration(2)
    return {"an exchange between islands": journey.files}


def reads_flags(rank):
    words = ["--p-grad", "0.1", "--loss-seed", "7"]
    parse_loss_flags(words)
    with Journey() as journey:
        parse_loss_flags(words)
    return {"two flags, read and checked": journey.files}


@pytest.fixture(scope="module")
def journeys():
    # Each in a process of its own, where nobody else's objects are cleaned up meanwhile.
    ranks = {under_megatron: 2, under_fsdp2: 2, over_datagrams: 2, between_islands: 1, reads_flags: 1}
    return {what: files for walk, size in ranks.items() for what, files in run_ranks(walk, size)[0].items()}


@pytest.mark.parametrize("what", CEILINGS)
def test_a_way_through_few_files(journeys, what):
    found, (files, changes) = journeys[what], CEILINGS[what]
    passed = list(dict.fromkeys(found))
    changed = sum(one != other for one, other in itertools.pairwise(found))
    assert 0 < len(passed) <= files and changed <= changes, (
        f"{len(passed)} files, {changed} changes: {' '.join(passed)}"
    )
