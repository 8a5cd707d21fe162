"""The seam without Megatron around it."""

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from megatron_lossy.hooks import seam
from megatron_lossy.transport import Transfer

pytestmark = pytest.mark.shows("collectives in and out of coalescing contexts")


class Group:
    """In the place of a lossy group: its gathers deliver ``0`` where the collective wrote ``1``."""

    def lossless(self, phase):
        return False

    def all_gather(self, bucket, output, sent, update, collective):
        return Transfer(collective(), output.zero_)


def gather(handle):
    """An all-gather through the seam, whose collective returns ``handle``; the buffer, and what the caller gets."""
    buffer = torch.full((2,), -1.0)
    seam.attach(buffer, seam.Slot(Group(), 0))

    def collective(output, input):
        output.fill_(1.0)
        return handle

    return buffer, seam.all_gather(SimpleNamespace(update=3), collective, buffer, buffer[:1])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_collective_outside_of_a_coalescing_context(elsewhere):
    """Also on a thread that never had one: a context that is open here concerns this thread only."""
    found = {}

    def run():
        found["synchronous"] = gather(None)
        found["asynchronous"] = gather(SimpleNamespace(wait=lambda: None))

    if elsewhere:
        context = seam.coalescing_manager(_open_context)
        with context:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
    else:
        run()
    buffer, handle = found["synchronous"]
    assert handle is None and buffer.tolist() == [0, 0]
    buffer, handle = found["asynchronous"]
    assert buffer.tolist() == [1, 1]
    handle.wait()
    assert buffer.tolist() == [0, 0]


def test_in_a_context_it_is_complete_when_the_context_is():
    with seam.coalescing_manager(_open_context):
        buffer, handle = gather(None)
        assert handle is None and buffer.tolist() == [1, 1]
    assert buffer.tolist() == [0, 0]


@pytest.mark.parametrize("named", [False, True])
def test_an_asynchronous_context_is_complete_when_its_handle_is(named):
    """``_coalescing_manager(group, device, async_ops)``: torch takes the last by its place as well as by its name."""
    arguments = ((None, None), {"async_ops": True}) if named else ((None, None, True), {})
    with seam.coalescing_manager(lambda *_, **__: _open_context(), *arguments[0], **arguments[1]) as handle:
        buffer, _ = gather(None)
    assert buffer.tolist() == [1, 1]
    handle.wait()
    assert buffer.tolist() == [0, 0]


class _open_context:
    def __enter__(self):
        return SimpleNamespace(wait=lambda: None)

    def __exit__(self, *_):
        return None


def test_who_ends_another_reduction_first_still_makes_its_own():
    """From 0.18 on a bucket group may do so in the start of its own."""
    told = []
    acts = tuple(lambda group, when=when: told.append(f"{when} {group}") for when in ("before", "after"))

    def start(group):
        if group == "own":
            seam.grad_sync(run, start)("other")  # it had begun already
            with seam.coalescing_manager(contextlib.nullcontext):
                told.append("reduced")

    run = SimpleNamespace(around_all_reduce=acts)
    seam.grad_sync(run, start)("own")
    with seam.coalescing_manager(contextlib.nullcontext):
        pass
    assert told == ["before own", "reduced", "after own"]
