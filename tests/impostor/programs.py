"""Small programs for the pretended device, each on a rank of its own."""

from __future__ import annotations

import ctypes
import functools
import io
import os
from collections.abc import Callable
from typing import Any

import torch

from .exchanges import STALLS
from .tracker import Tracker


def _on_device(program: Callable[[], Any], devices: int = 1) -> tuple[Any, Tracker]:
    """Run ``program`` on a new device; return its result and the tracker."""
    from . import device

    tracker = device.tracked(devices=devices)
    result = program()
    torch.zeros(1, device="cuda")  # it also reports the blocks freed last
    return result, tracker


def _of_device(devices: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a function of a rank run on a new device."""

    def decorated(program: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(program)(lambda *args: _on_device(functools.partial(program, *args), devices)[0])

    return decorated


@_of_device()
def follow_pointer(rank: int) -> int:
    """Read device memory on the host."""
    tensor = torch.ones(4, device="cuda")
    return ctypes.c_float.from_address(tensor.data_ptr()).value


@_of_device(devices=2)
def error_of(rank: int, name: str) -> str:
    """Return the error of a program that mixes devices."""
    mixing = {
        "cpu": lambda: torch.ones(2, device="cuda") + torch.ones(2),
        "index_select": lambda: torch.ones(2, device="cuda").index_select(0, torch.tensor([0])),
        "other": lambda: torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1"),
    }
    try:
        mixing[name]()
    except RuntimeError as error:
        return str(error)
    return "no error"


def stalls_of(rank: int, name: str) -> list[str]:
    """Return the kinds of stalls of a program, in order."""
    programs: dict[str, Callable[[torch.Tensor], Any]] = {
        "item": lambda x: x[0].item(),
        "nonzero": lambda x: x.nonzero(),
        "mask": lambda x: x[x > 0],
        "masked fill": lambda x: x.index_put_((x > 0,), torch.zeros((), device="cuda")),
        "masked put": lambda x: x.index_put_((x > 0,), torch.ones(4, device="cuda")),
        "host index": lambda x: x[torch.tensor([0, 1])],
        "tensor": lambda x: torch.tensor([1.0], device="cuda"),
        "blocking": lambda x: x.cpu(),
        "pageable": lambda x: torch.ones(4).to("cuda", non_blocking=True),
        "pinned": lambda x: torch.ones(4).pin_memory().to("cuda", non_blocking=True),
        "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
        "stream": lambda x: torch.cuda.current_stream().synchronize(),
        "device": lambda x: torch.cuda.synchronize(),
        "arithmetic": lambda x: (x + 1) * 2,
    }
    _, tracker = _on_device(lambda: programs[name](torch.ones(4, device="cuda")))
    return [count.kind for count in tracker.counts if count.kind in STALLS]


def faults_of(rank: int, name: str) -> list[str]:
    """Return the faults of a program that uses two streams or page-locked memory, by their first words."""

    def streams(order: bool, announced: bool = True) -> None:
        side = torch.cuda.Stream()
        tensor = torch.ones(8, device="cuda")
        if order:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            tensor.add_(1)
        if announced:
            tensor.record_stream(side)
        del tensor

    def to_host(waits: bool, writes: bool = False) -> bool:
        host = torch.zeros(4).pin_memory()
        host.copy_(torch.ones(4, device="cuda"), non_blocking=True)
        if writes:
            host[0] = 7
        if waits:
            torch.cuda.synchronize()
        arrived = bool((host == 1).all())
        torch.cuda.synchronize()
        return arrived

    def to_device(waits: bool) -> None:
        host = torch.ones(4).pin_memory()
        host.to("cuda", non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        host.zero_()
        torch.cuda.synchronize()

    programs: dict[str, Callable[[], Any]] = {
        "ordered": lambda: streams(True),
        "unordered": lambda: streams(False),
        "not announced": lambda: streams(True, announced=False),
        "waited for": lambda: to_host(True),
        "read early": lambda: to_host(False),
        "written early": lambda: to_host(True, writes=True),
        "source kept": lambda: to_device(True),
        "source overwritten": lambda: to_device(False),
    }
    result, tracker = _on_device(programs[name])
    faults = [fault.partition(" x ")[2].partition(":")[0] for fault in tracker.findings().faults]
    return sorted(set(faults)) + ["not there yet"] * (result is False)


@_of_device()
def ask_twice(rank: int) -> list[bool]:
    """Return the answers of an event of a busy device."""
    torch.ones(4, device="cuda").add_(1)
    event = torch.cuda.current_stream().record_event()
    return [event.query(), event.query()]


@_of_device(devices=2)
def take_devices(rank: int) -> tuple[str, str, float]:
    """Return the device that this rank takes, that of a sum over ranks, and the sum."""
    import torch.distributed as dist

    from megatron_lossy.base import device as product

    assert os.environ["LOCAL_RANK"] == str(rank)
    product.init_process_group()
    tensor = torch.full((3,), 1.0 + rank, device=product.current_device())
    [found] = dist.all_reduce(tensor, async_op=True).get_future().wait()
    return str(product.current_device()), str(found.device), found[0].item()


@_of_device()
def save(rank: int) -> list[float]:
    """Return the saved form of a part of a tensor."""
    file = io.BytesIO()
    torch.save(torch.arange(4.0, device="cuda")[1:], file)
    loaded = torch.load(io.BytesIO(file.getvalue()))
    return loaded.tolist() if loaded.is_cuda else []


@_of_device()
def draw(rank: int) -> tuple[bool, bool]:
    """Return whether the device draws what the CPU does with the same seed, and leaves the CPU's generator alone."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    on_device = torch.randn(5, device="cuda")
    dropped = torch.nn.functional.dropout(torch.ones(64, device="cuda"), 0.5)
    alone = torch.equal(before, torch.get_rng_state())
    same = torch.equal(on_device.cpu(), torch.randn(5))
    return same and 0 < int((dropped == 0).sum()) < 64, alone
