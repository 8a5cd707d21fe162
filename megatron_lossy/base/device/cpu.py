"""The parts of CUDA that megatron.core names, as stand-ins for training on CPU over gloo.

Each stand-in does on the CPU what its CUDA original does on a GPU. Work is done when a call returns, so that streams
and events have nothing to wait for. The random state is that of the CPU's generator. Memory asked for on "cuda" comes
from the CPU. Functions under ``torch.compile`` run eagerly: compiling for the CPU costs small runs more than it saves.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..ledger import Patch

_CPU = torch.device("cpu")
# The constructors that Megatron calls with device="cuda".
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros", "zeros_like")


class CpuStream(torch.cpu.Stream):
    """``torch.cuda.Stream`` on the CPU. Its work is finished before a wait for it can begin."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        super().__init__(priority)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event(torch.cpu.Event):
    """``torch.cuda.Event``; the time of an event is the wall clock's."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        super().__init__()
        self._recorded = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds from this event to ``end``."""
        return 1e3 * (end._recorded - self._recorded)


_streams = [CpuStream()]  # the default one, then those of the contexts that are open


class StreamContext:
    """``torch.cuda.stream(...)``; can be entered again, as Megatron does with more than one optimizer instance."""

    def __init__(self, stream: CpuStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        _streams.append(self.stream or _streams[-1])

    def __exit__(self, *_: Any) -> None:
        _streams.pop()


def nothing(*_: Any, **__: Any) -> None:
    pass


def _factory(original: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
    """Wrap a constructor of tensors: a CUDA device becomes the CPU, which has no pinned memory either."""
    if str(kwargs.get("device")).startswith("cuda"):
        kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
    return original(*args, **kwargs)


def _tensor_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Stand for ``Tensor.type``: without arguments, name the CUDA type as on a GPU."""
    result = torch._C.TensorBase.type(tensor, *args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


@contextlib.contextmanager
def _fork_rng(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Stand for ``CudaRNGStatesTracker.fork``, which warns when the CPU's generator moves: here it must."""
    if name not in tracker.states_:
        raise KeyError(f"the random state {name} was never added to the tracker")
    outer, outer_name = torch.get_rng_state(), getattr(tracker, "_current_state_name", None)  # 0.16 and later
    # Forking again inside a fork of the same name goes on where the outer one stands.
    if outer_name in tracker.states_:
        tracker.states_[outer_name] = outer
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        tracker._current_state_name = outer_name
        torch.set_rng_state(tracker.states_.get(outer_name, outer))


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand for ``maybe_move_tensor_to_cpu``: Megatron makes NumPy arrays only of tensors that it moved."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _quantize(original: Callable, model_params: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap ``_quantize_param_shard_impl`` of 0.12, which fails without Transformer Engine even without fp8."""
    if model_params:
        original(model_params, *args, **kwargs)


def _compile(original: Callable, model: Any = None, **options: Any) -> Any:
    """Wrap ``torch.compile``, as a call and as a decorator with options: functions of Megatron stay as they are."""
    if model is None:
        return lambda model: _compile(original, model, **options)
    return model if str(getattr(model, "__module__", "")).startswith("megatron.") else original(model, **options)


def replaced(target: str, replacement: Any, why: str, **options: Any) -> Patch:
    """Return a patch whose new value is ``replacement``."""
    if isinstance(replacement, types.FunctionType):
        # torch.compile keeps one rule per function object: no two names may share one.
        replacement = types.FunctionType(
            replacement.__code__,
            replacement.__globals__,
            replacement.__name__,
            replacement.__defaults__,
            replacement.__closure__,
        )
    return Patch(target=target, value=lambda: replacement, why=why, **options)


def import_patches() -> list[Patch]:
    """Return the attributes that are replaced before megatron.core is imported on a machine without an accelerator."""
    why = "Megatron's functions run eagerly on CPU, and their decorators would import the compiler, for 1.5 s"
    return [Patch(target="torch:compile", around=_compile, why=why)]


def patches() -> list[Patch]:
    """Return every attribute that megatron.core needs replaced on a machine without an accelerator."""
    streams = "overlapped communication names CUDA streams"
    events = "timers and overlapped communication record CUDA events"
    memory = "frees or asks about memory of the GPU"
    state = "the random state of dropout is that of the CPU's generator"
    rng = "megatron.core.tensor_parallel.random"
    return [
        # Megatron only passes this on as a device, and CUDA's index would not serve as one.
        replaced("torch.cuda:current_device", lambda: _CPU, "buffers are created on torch.cuda.current_device()"),
        replaced("torch.cuda:set_device", nothing, "there is one device"),
        replaced("torch.cuda:synchronize", nothing, "work is done when a call returns"),
        replaced("torch.cuda:Stream", CpuStream, streams),
        replaced("torch.cuda:stream", StreamContext, streams),
        replaced("torch.cuda:current_stream", lambda device=None: _streams[-1], streams),
        replaced("torch.cuda:default_stream", lambda device=None: _streams[0], streams),
        replaced("torch.cuda:Event", Event, events),
        replaced("torch.cuda:empty_cache", nothing, memory),
        replaced("torch.cuda:manual_seed", torch.manual_seed, state),
        replaced("torch.cuda:get_rng_state", _get_rng_state, state),
        replaced("torch.cuda:set_rng_state", _set_rng_state, state),
        replaced("torch.cuda.random:get_rng_state", _get_rng_state, state),
        replaced(f"{rng}:_get_cuda_rng_state", _get_rng_state, state, optional=True),
        replaced(f"{rng}:_set_cuda_rng_state", _set_rng_state, state),
        replaced(f"{rng}:CudaRNGStatesTracker.fork", _fork_rng, state),
        replaced(
            "torch:Tensor.cuda", lambda tensor, *_, **__: tensor, "moves tensors and modules to the GPU", create=True
        ),
        replaced(
            "torch:Tensor.type",
            _tensor_type,
            "optimizers sort parameters, and clipping checks gradients, by 'torch.cuda.*' type names",
            create=True,
        ),
        replaced(
            "megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
            _to_host,
            "all-to-all takes its split sizes as numbers, not as a tensor",
            optional=True,
        ),
        replaced(
            "megatron.core.transformer.moe.moe_utils:te_general_gemm",
            None,
            "the router reads a name that 0.16 defines only where Transformer Engine is installed",
            optional=True,
            create=True,
        ),
        Patch(
            target="megatron.core.fp8_utils:_quantize_param_shard_impl",
            around=_quantize,
            why="the update of parameters that are not fp8 goes through it too",
            optional=True,
        ),
        replaced("torch._dynamo.config:disable", True, "compiling for the CPU takes longer than small runs do"),
        *(
            Patch(target=f"torch:{name}", around=_factory, why='scalars and masks are created with device="cuda"')
            for name in _FACTORIES
        ),
    ]
