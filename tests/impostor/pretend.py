"""Makes this process of a CPU build of torch have CUDA devices. Nothing of megatron_lossy is touched."""

from __future__ import annotations

import importlib
import os
import types
from datetime import timedelta
from typing import Any

import torch

from .build import load
from .tracker import Tracker

DEVICES = 1
T = Tracker()
C: Any = None


class Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device=None, priority=0, **kw):
        if "stream_id" in kw:
            return torch.Stream.__new__(cls, stream_id=kw["stream_id"], device_index=0, device_type=1)
        return torch.Stream.__new__(cls, device="cuda:0", priority=priority)

    @property
    def cuda_stream(self):
        return self.stream_id


class Event(torch.Event):
    """``torch.cuda.Event``."""

    def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
        return torch.Event.__new__(cls, device="cuda:0", enable_timing=enable_timing)

    def record(self, stream=None):
        torch.Event.record(self, stream or current_stream())

    def wait(self, stream=None):
        torch.Event.wait(self, stream or current_stream())


class StreamContext:
    """``torch.cuda.stream``."""

    def __init__(self, stream):
        self.stream = stream
        self.old = []

    def __enter__(self):
        self.old.append(C.current_stream())
        if self.stream is not None:
            C.set_stream(self.stream.stream_id)

    def __exit__(self, *a):
        C.set_stream(self.old.pop())


def current_stream(device=None):
    return Stream(stream_id=C.current_stream())


def default_stream(device=None):
    return Stream(stream_id=0)


def synchronize(device=None):
    T("sync_device", "torch.cuda.synchronize", C.current_stream(), 0, [], [], [], [], None)


class _Options:
    """``ProcessGroupNCCL.Options``."""

    is_high_priority_stream = False
    _timeout = timedelta(minutes=10)


def install() -> None:
    """Make CUDA appear in this process; before anything asks for a device."""
    global C
    C = load()
    C.set_callback(T)
    state = lambda device="cuda", **_: torch.get_rng_state()
    new_state = lambda new, device="cuda", **_: torch.set_rng_state(new)
    properties = types.SimpleNamespace(
        major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, name="pretended"
    )
    stand_ins = dict(
        _lazy_init=lambda: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: DEVICES,
        current_device=lambda: 0,
        set_device=lambda d: None,
        synchronize=synchronize,
        Stream=Stream,
        Event=Event,
        stream=StreamContext,
        current_stream=current_stream,
        default_stream=default_stream,
        set_stream=lambda s: C.set_stream(s.stream_id),
        empty_cache=lambda: None,
        manual_seed=torch.manual_seed,
        manual_seed_all=lambda s: None,
        get_rng_state=state,
        set_rng_state=new_state,
        default_generators=(torch.default_generator,),
        is_current_stream_capturing=lambda: False,
        get_device_capability=lambda d=None: (9, 0),
        get_device_name=lambda d=None: "pretended",
        memory_allocated=lambda d=None: 0,
        max_memory_allocated=lambda d=None: 0,
        get_device_properties=lambda d=None: properties,
    )
    for name, value in stand_ins.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = state, new_state
    c10d = torch.distributed.distributed_c10d
    C.ProcessGroupNCCL.Options = _Options
    c10d.ProcessGroupNCCL, c10d._NCCL_AVAILABLE = C.ProcessGroupNCCL, True
    torch._dynamo.config._config["disable"].default = True  # in the threads of autograd too
    for module in map(importlib.import_module, ("torch.optim.adam", "torch.optim.adamw")):
        if hasattr(module, "_default_to_fused_or_foreach"):
            module._default_to_fused_or_foreach = lambda *a, **k: (False, False)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
