"""Makes this process, whose torch was built without CUDA, have CUDA devices.

:func:`install` gives ``torch.cuda`` and ``torch.distributed`` what CUDA's build of torch has there. Everything else is
the C++ below ``csrc``. Nothing of ``megatron_lossy`` is touched, nor of Megatron.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from .build import load
from .tracker import Tracker

_native: Any = None
_tracker: Tracker | None = None


def native() -> Any:
    """Return the C++ module of this process; :func:`install` loads it."""
    return _native


def _index(device: Any = None) -> int:
    """Return the number of a device that is given in any of torch's ways."""
    if device is None:
        return _native.current_device()
    if isinstance(device, int):
        return device if device >= 0 else _native.current_device()
    number = torch.device(device).index
    return _native.current_device() if number is None else number


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Stream:
        if "stream_id" in known:
            return torch.Stream.__new__(cls, **known)
        return torch.Stream.__new__(cls, device=f"cuda:{_index(device)}", priority=priority)

    @property
    def cuda_stream(self) -> int:
        """The handle."""
        return self.stream_id

    def record_event(self, event: Any = None) -> Event:
        """Return ``event``, or a new one, after the work so far."""
        event = event or Event()
        event.record(self)
        return event


class Event(torch.Event):
    """``torch.cuda.Event``."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **_: Any) -> Event:
        return torch.Event.__new__(cls, device=f"cuda:{_index()}", enable_timing=enable_timing, blocking=blocking)

    def record(self, stream: Any = None) -> None:
        """Stand for the work of ``stream`` so far."""
        super().record(stream or _current_stream())

    def wait(self, stream: Any = None) -> None:
        """Let later work of ``stream`` wait."""
        super().wait(stream or _current_stream())


class _OnStream:
    """``torch.cuda.stream``."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._outer: list[tuple[int, Stream, int]] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            device, outer = self._stream.device_index, _native.current_device()
            self._outer.append((outer, _current_stream(device), device))
            _set_stream(self._stream)

    def __exit__(self, *_: Any) -> None:
        if self._stream is not None:
            outer, stream, device = self._outer.pop()
            _native.set_current_stream(device, stream.stream_id)
            _native.set_current_device(outer)


class _OnDevice:
    """``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        self.prev_idx = _native.current_device()
        _native.set_current_device(self.idx)

    def __exit__(self, *_: Any) -> None:
        _native.set_current_device(self.prev_idx)


def _known_stream(stream_id: int, device: int) -> Stream:
    return Stream(stream_id=stream_id, device_index=device, device_type=1)


def _current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return _known_stream(_native.current_stream(index), index)


def _set_stream(stream: Stream) -> None:
    _native.set_current_device(stream.device_index)
    _native.set_current_stream(stream.device_index, stream.stream_id)


def _synchronize(device: Any = None) -> None:
    if _tracker is not None:
        _tracker.synchronised("device", _index(device))


class _NcclOptions:
    """``ProcessGroupNCCL.Options``."""

    is_high_priority_stream = False
    _timeout = timedelta(minutes=10)


def _storage_to(storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """Return ``torch.storage._to``; torch that was built without CUDA makes no storages of it."""
    if storage.device == device:
        return storage
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage()
    copy.copy_(storage, non_blocking)
    return copy


def _device_count() -> int:
    return 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else _native.device_count()


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _of_torch_cuda() -> dict[str, Any]:
    """Return functions of ``torch.cuda``."""
    properties = types.SimpleNamespace(
        name="a pretended CUDA device", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132
    )
    always: Callable[[Any], Callable[..., Any]] = lambda value: lambda *_, **__: value
    states = lambda: [_native.generator(k) for k in range(_native.device_count())]
    return {
        "_lazy_init": _nothing,
        "_is_in_bad_fork": always(False),
        "is_available": lambda: _device_count() > 0,
        "is_initialized": always(True),
        "is_bf16_supported": always(True),
        "is_current_stream_capturing": always(False),
        "device_count": _device_count,
        "current_device": lambda: _native.current_device(),
        "set_device": lambda device: _native.set_current_device(_index(device)),
        "device": _OnDevice,
        "get_device_name": always(properties.name),
        "get_device_capability": always((properties.major, properties.minor)),
        "get_device_properties": always(properties),
        "synchronize": _synchronize,
        "Stream": Stream,
        "Event": Event,
        "stream": _OnStream,
        "current_stream": _current_stream,
        "default_stream": lambda device=None: _known_stream(0, _index(device)),
        "set_stream": _set_stream,
        "empty_cache": _nothing,
        "set_per_process_memory_fraction": _nothing,
        "_sleep": lambda cycles: torch.zeros(1, device="cuda"),
        "mem_get_info": always((properties.total_memory, properties.total_memory)),
        "memory_allocated": always(0),
        "max_memory_allocated": always(0),
        "memory_reserved": always(0),
        "max_memory_reserved": always(0),
        "reset_peak_memory_stats": _nothing,
        "default_generators": tuple(states()),
        "manual_seed": lambda seed: _native.generator(-1).manual_seed(seed) and None,
        "manual_seed_all": lambda seed: [one.manual_seed(seed) for one in states()] and None,
    } | {name: value for name, value in _of_random().items() if not name.startswith("_")}


def _of_random() -> dict[str, Any]:
    """Return functions of ``torch.cuda.random``."""
    return {
        "get_rng_state": lambda device="cuda": _native.generator(_index(device)).get_state(),
        "set_rng_state": lambda state, device="cuda": _native.generator(_index(device)).set_state(state) and None,
    }


def install(tracker: Tracker | None = None, devices: int = 1) -> None:
    """Give this process ``devices`` CUDA devices that report their work to ``tracker``. It cannot be undone.

    Call it before anything asks for a device. Raise :class:`~tests.impostor.build.CannotBuild`.
    """
    global _native, _tracker
    first = _native is None
    _native, _tracker = _native or load(), tracker
    _native.set_observer(tracker)
    _native.set_device_count(devices)
    if not first:
        return
    _native.become_cuda()
    nccl = {"version": lambda: (2, 99, 0)}
    for module, names in ((torch.cuda, _of_torch_cuda()), (torch.cuda.random, _of_random()), (torch.cuda.nccl, nccl)):
        for name, value in names.items():
            setattr(module, name, value)
    groups = torch.distributed.distributed_c10d
    _native.ProcessGroup.Options = _NcclOptions
    groups.ProcessGroupNCCL, groups._NCCL_AVAILABLE = _native.ProcessGroup, True
    torch.storage._to = _storage_to
    if "CUDA_HOME" in os.environ:  # torch that was built without CUDA does not look for it
        from torch.utils import cpp_extension

        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"]
    # It cannot resize a storage: unsharded parameters of FSDP2 stay where they are.
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    _fsdp_param.free_storage = _fsdp_param.alloc_storage = _nothing
    # No compiler makes kernels for it. A setting of this thread alone would not reach those of autograd.
    torch._dynamo.config._config["disable"].default = True


def tracked(backends: str | None = None, devices: int = 1) -> Tracker:
    """Install with a new tracker and return it. ``backends``: those of a process group, which begins then."""
    tracker = Tracker()
    install(tracker, devices)
    if backends is not None:
        torch.distributed.init_process_group(backends)
    return tracker


def install_with_tracker() -> None:
    """As :func:`install`, with a tracker of its own: what nobody has waited for is not there yet."""
    install(Tracker())


def everywhere(folder: Path) -> None:
    """Let each program of Python that has ``folder`` in its ``PYTHONPATH`` have a CUDA device as soon as it imports torch."""
    described = folder / "impostor-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "entry_points.txt").write_text(f"[torch.backends]\nimpostor = {__name__}:install_with_tracker\n")


def add_hpu() -> None:
    """Give tensors of this process the device "hpu" too, and process groups the backend "hccl"; after :func:`install`.

    For code that asks a tensor for its device. There is no Megatron on it, and the sequence of operators is recorded
    (:attr:`Tracker.sequence`): a device that compiles graphs compiles another one for each other sequence.
    """
    module = types.ModuleType("torch.hpu")
    for name, value in (("_lazy_init", _nothing), ("is_available", lambda: True), ("current_device", lambda: 0)):
        setattr(module, name, value)
    sys.modules["torch.hpu"] = torch.hpu = module
    _native.want_arguments(True)

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return _native.ProcessGroup(store, rank, size, types.SimpleNamespace(_timeout=timeout))

    torch.distributed.Backend.register_backend("hccl", create, devices=["hpu"])
