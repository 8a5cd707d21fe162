"""Pipeline stages in one process, each with weights as old as in an asynchronous pipeline with weight stashing.

Stage s of P (from 0) begins batch n after n - (P - 1 - s) updates. It makes the backward pass with the weights of the
forward pass (PipeDream, Narayanan et al. 2019, section 3.3; *AsyncMesh*, section 2.2). So the gradient of batch n comes
from one forward and backward pass with stage s as it was P - 1 - s updates before, and this module computes just that.
The update is made to the newest weights, and each stage clips its gradient by its own norm.

Its twin is :mod:`.workers`: real stages have several batches under way, here only the age of weights is left of that.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...base.errors import UsageError, refuse
from ...base.ledger import Patch, patched
from ...hooks.buckets import buckets_by_stream
from ...run.mechanism import Part

# Versions change places in pieces that fit into a core's cache.
_PIECE = 2**17


def stage_of(name: str, layers: int, stages: int) -> int:
    """Return the stage of the parameter ``name`` of a GPT of ``layers`` in ``stages`` of equal length."""
    if layer := re.search(r"\bdecoder\.layers\.(\d+)\.", name):
        return int(layer[1]) * stages // layers
    if re.search(r"\bembedding\.", name):
        return 0
    if re.search(r"\b(decoder\.final_(layer)?norm|output_layer)\b", name):
        return stages - 1
    raise UsageError(f"--virtual-stages: {name} is in no stage of a GPT")


class Stages(Part):
    """The ``stages`` stages of a virtual run. Workers have a history of weights each, or share one if they are equal."""

    name = "stages"

    def __init__(self, stages: int) -> None:
        self._stages = stages
        #: By bucket: its gradients, and (start, stop, stage) of the elements.
        self._places: list[tuple[torch.Tensor, list[tuple[int, int, int]]]] = []
        self._histories: list[_History] = []
        self._norms: list[float] = []

    def attach(self, run: Any) -> None:
        self._run = run
        run.stages = self
        run.events.on(chunk_added=self.add_model_chunk, restart=self.restart)

    def add_model_chunk(self, ddp: Any) -> None:
        """Cut the buckets of ``ddp`` into stages."""
        stages = self._stages
        named, layers = ddp.module.named_parameters(), ddp.config.num_layers
        numbers = {parameter: stage_of(name, layers, stages) for name, parameter in named}
        pairs = [pair for _, _, buckets in buckets_by_stream(ddp) for pair in buckets]
        self._places = [(bucket.grad_data, _ranges(buffer, bucket, numbers)) for buffer, bucket in pairs]
        views = [
            (bucket.param_data[start:stop], stages - 1 - stage)
            for (_, bucket), (_, ranges) in zip(pairs, self._places, strict=True)
            for start, stop, stage in ranges
            if stage < stages - 1
        ]
        differ = any(not group.lossless("param") for group in self._run.groups)
        self._histories = [_History(views) for _ in range(self._run.workers if differ else 1)]

    @contextlib.contextmanager
    def computing(self, worker: int, last: bool) -> Iterator[None]:
        """Return a context in which the model's weights are as old as in the stages of ``worker``, for a batch."""
        shared = len(self._histories) == 1
        history = self._histories[0 if shared else worker]
        with torch.no_grad():
            history.swap()
        try:
            yield
        finally:
            with torch.no_grad():
                if last or not shared:
                    history.advance()
                else:
                    history.swap()

    def restart(self, iteration: int) -> None:
        """Give all stages the newest weights."""
        for history in self._histories:  # all versions are equal to the newest
            history.restart()

    def state_dict(self) -> list[list[list[torch.Tensor]]]:
        """Return the old weights: for each history and range, from the oldest on."""
        return [history.state() for history in self._histories]

    def load_state_dict(self, state: list[list[list[torch.Tensor]]]) -> None:
        for history, saved in zip(self._histories, state, strict=True):
            history.load(saved)

    def updating(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which an optimizer clips each stage by its own norm, and reports the norm of all."""
        replacements = {"get_grad_norm_fp32": self._grad_norm, "clip_grad_by_total_norm_fp32": self._clip}
        module = "megatron.core.optimizer.optimizer"
        why = "a stage of an asynchronous pipeline has its own gradients alone"
        patches = [Patch(target=f"{module}:{name}", around=new, why=why) for name, new in replacements.items()]
        return patched("virtual stages", *patches)

    def _grad_norm(self, original: Callable[..., float], grads_for_norm: Any, *args: Any, **kwargs: Any) -> float:
        self._norms = [original(own, *args, **kwargs) for own in self._by_stage(grads_for_norm, lambda grad: grad)]
        return math.hypot(*self._norms)

    def _clip(
        self,
        original: Callable[..., None],
        parameters: Any,
        max_norm: float,
        total_norm: float,
        use_decoupled_grad: bool = False,
    ) -> None:
        if use_decoupled_grad:
            raise refuse("--use-precision-aware-optimizer", "on", "cannot be with --async-pipeline; turn it off")
        with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
        for norm, own in zip(self._norms, self._by_stage(with_gradient, lambda parameter: parameter.grad), strict=True):
            original(own, max_norm, norm)

    def _by_stage(self, items: Any, gradient: Callable[[Any], torch.Tensor]) -> list[list[Any]]:
        """Return ``items`` of each stage. ``gradient`` returns the gradient of an item, a view into the buffers."""
        result: list[list[Any]] = [[] for _ in range(self._stages)]
        for item in items:
            result[self._stage_of(gradient(item))].append(item)
        return result

    def _stage_of(self, gradient: torch.Tensor) -> int:
        for buffer, ranges in self._places:
            place = (gradient.data_ptr() - buffer.data_ptr()) // buffer.element_size()
            if 0 <= place < buffer.numel() and gradient.device == buffer.device:
                return next(stage for start, stop, stage in ranges if start <= place < stop)
        raise RuntimeError("a gradient lies outside the gradient buffers")


class _History:
    """Old weights of ``views``. Each pair is (view, number of its versions)."""

    def __init__(self, views: Sequence[tuple[torch.Tensor, int]]) -> None:
        self._views = views
        self._versions: list[deque[torch.Tensor]] = []

    def swap(self) -> None:
        """Let the newest weights and the oldest ones change places."""
        if not self._versions:
            self._versions = [deque(view.clone() for _ in range(delay)) for view, delay in self._views]
        for (view, _), versions in zip(self._views, self._versions, strict=True):
            for new, old in zip(view.split(_PIECE), versions[0].split(_PIECE), strict=True):
                kept = new.clone()
                new.copy_(old)
                old.copy_(kept)

    def advance(self) -> None:
        """Forget the oldest weights and put the newest back, keeping a copy. Call it after :meth:`swap`."""
        for (view, _), versions in zip(self._views, self._versions, strict=True):
            view.copy_(versions[0])
            versions.rotate(-1)

    def restart(self) -> None:
        self._versions = []

    def state(self) -> list[list[torch.Tensor]]:
        return [list(versions) for versions in self._versions]

    def load(self, state: list[list[torch.Tensor]]) -> None:
        device = self._views[0][0].device
        self._versions = [deque(version.to(device) for version in versions) for versions in state]


def _ranges(buffer: Any, bucket: Any, numbers: dict[Any, int]) -> list[tuple[int, int, int]]:
    """Return (start, stop, stage) of the elements of ``bucket``. Neighbours of a stage are one range, with padding."""
    places = sorted(
        (*(place - bucket.offset for place in buffer.param_index_map[parameter][:2]), numbers[parameter])
        for parameter in bucket.params_list
    )
    result: list[tuple[int, int, int]] = []
    for start, stop, stage in places:
        if result and result[-1][2] == stage:
            start = result.pop()[0]
        result.append((start, stop, stage))
    return result
