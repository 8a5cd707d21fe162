"""A run of PyTorch's own data parallelism: its clock is the optimizer's steps, and the rounds of gradients."""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base.errors import UsageError, refuse
from ..base.exchange import Stream
from ..channel.corruption.applied import Errors
from ..config import LossyConfig
from ..run.base import Run
from ..run.saved import REPLICAS, check_identity, flags_of, write
from ..transport import find_nodes
from .arguments import check_still_alike, parameters_of
from .exchanges import Round
from .steps import Kind, Steps

#: The folder of the delivery log, if there is one, of each run of this process that is not closed, by its number.
_open: dict[int, str | None] = {}


class LossyRun(Run):
    """The base of the runs of FSDP2 and of DDP; :func:`.make_lossy` makes them.

    An iteration is a round of gradient exchanges: a bucket that is reduced again begins the next one, so that
    micro-batches that are reduced one by one draw anew. A step of the optimizer ends the iteration too; whether it is an
    update, :mod:`.steps` decides. With several optimizers that is the step of the last one.

    ``number``: of the model among those of this process, the smallest that is free; it is in the key of all draws, so that
    two models lose different units. It is free again after :meth:`close`, the same on all ranks.

    ``scaler``: a ``GradScaler``, for rules that keep gradients over steps. Its factor shrinks where it rejects a step.
    """

    def __init__(
        self,
        config: LossyConfig,
        optimizers: Sequence[torch.optim.Optimizer],
        steps: int | None,
        gapless: bool,
        scaler: Any,
    ) -> None:
        super().__init__(config, steps, gapless)
        self._flags = {} if config.inert else flags_of(config)
        if config.delivery_log is not None and config.delivery_log in _open.values():
            why = "has the log of another model; give each its own folder"
            raise refuse("--delivery-log", config.delivery_log, why)
        self.number = next(number for number in itertools.count() if number not in _open)
        self.stream = Stream(stage=self.number)
        self.optimizers = list(optimizers)
        self._parameters = parameters_of(self.optimizers)
        self.round = Round(self._finish_round, scaler)
        self._exchanged = False  # whether an earlier round since the last step reduced anything
        self._scaler = scaler
        self.holds = False  # whether the owners' weights are in the model
        self._closed = False
        self._steps = Steps(self.optimizers, self)
        me = weakref.ref(self)  # a program may drop the run before its end

        def close_observers() -> None:
            if (run := me()) is not None:
                run.close_observers()

        self._at_exit = atexit.register(close_observers)

    def begin(self) -> None:
        """Take the run's number, now that it is whole."""
        _open[self.number] = self.config.delivery_log

    # --- which step it is ------------------------------------------------------------------------------------------

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an outermost step begins."""
        if optimizer in self.round.stepped:
            self._finish_round()
        if self.holds:
            why = "leave owner_weights() before a step of the optimizer"
            raise RuntimeError(f"the model has its owners' weights: {why}")
        check_still_alike(self.optimizers, self._parameters)
        self.check_weights()

    def check_scaler(self) -> None:
        """Note that a ``GradScaler`` is in use. Raise :class:`UsageError` if the run needs it, and does not have it."""
        rules = [rule for group in self.groups for rule in group.grads]
        if self._scaler is None and any(rule.carries_over or rule.feeds_back for rule in rules):
            rule = f"--grad-recovery {self.config.grad_recovery}"
            why = f"a GradScaler is in use, and {rule} keeps gradients over steps: give it as scaler= to make_lossy"
            raise refuse("scaler", None, why)

    def use_gradients(self, kind: Kind) -> None:
        """Note that a step is about to use its gradients; again if it evaluates its closure again."""
        if kind is Kind.REJECTED or (kind is Kind.IDLE and not self.round.reduced):
            return
        if kind is Kind.UPDATE:
            self.check_exchanges()
        if not self.round.used:
            self.round.used = True
            self.events.iteration_begins()
        if kind is Kind.UPDATE and not self.round.updates:
            self.round.updates = True
            self.begin_update()

    def end_step(self, optimizer: torch.optim.Optimizer, kind: Kind) -> None:
        """Note that an outermost step has ended."""
        self.round.stepped[optimizer] = kind
        if kind is Kind.UPDATE:
            self.note_update()
        self.note_weights()
        if len(self.round.stepped) == len(self.optimizers):
            self._finish_round()

    def _finish_round(self) -> None:
        """End the round of gradients that optimizers have used, or that a new one follows."""
        kinds, reduced = set(self.round.stepped.values()), bool(self.round.reduced)
        used = Kind.IDLE in kinds if kinds else not self.round.rejected
        self._exchanged = not kinds and (self._exchanged or reduced)
        self.round.begin()
        if Kind.UPDATE in kinds:
            self.check_weights()
            self.update = self.iteration
            self.events.iteration_ends()
            self.finish_iteration(True, all_reduced=not reduced)
            self.note_weights()
        elif reduced:
            self.finish_iteration(False, used=used)

    def loss_scale(self) -> float | None:
        return self.round.loss_scale()

    def nodes_of(self, ranks: Sequence[int]) -> list[int] | None:
        """Return the node of each of ``ranks``; ``None`` if nodes do not matter. A collective call of all ranks."""
        if self.config.ranks_of_node is None:
            return None
        everywhere = find_nodes(None, self.config.ranks_of_node)
        return [everywhere[rank] for rank in ranks]

    def errors_of(self, dtypes: Sequence[torch.dtype], ranges: Sequence[np.ndarray], rank: int) -> Errors:
        """Return the errors in the gradients that ``rank`` has, in ``ranges`` int64[k, 2] of buckets of ``dtypes``.

        Raise as :class:`.Errors`.
        """
        return Errors(self.corruption, rank, ranges, min(8 * dtype.itemsize for dtype in dtypes))

    def catch_up(self, step: int, loss: float = 0.0) -> int:
        """Return the number of the update to make after ``step`` updates.

        That is ``step``, unless other islands (``rendezvous``) have gone on without this one. Call it before each update. A collective call of the ranks of this launch. ``loss``: of the last update, for operators.
        Raise :class:`UsageError` if this island is refused, or has lost its slot.
        """
        self.events.logged(loss)
        return self.job_group.catch_up(step)

    def note_update(self) -> None:
        """Note that an optimizer has changed the weights."""

    def note_weights(self) -> None:
        """Note that the weights are as optimizers and mechanisms left them."""

    def check_weights(self) -> None:
        """Raise ``RuntimeError`` if other code has written weights since :meth:`note_weights`."""

    def check_exchanges(self) -> None:
        """Raise ``RuntimeError`` if gradients that the optimizer is about to use went past the exchanges."""
        held = (parameter.grad is not None for parameter in self._parameters.values())
        if not (self._exchanged or self.round.reduced) and any(held):
            raise RuntimeError(
                "the optimizer has gradients, but none was exchanged since its last step through what make_lossy put into the "
                "model, so that nothing of them could be lost"
            )

    # --- weights and state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the stale units of this rank, and the state of rules and monitors. A collective call.

        Saved along with a checkpoint of model and optimizer, it lets a run continue bit for bit.
        """
        if self.round.stepped or self.round.reduced:
            self._finish_round()  # another run may follow, which does not finish it
        self._save_observers()
        return self._state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`, after model and optimizer were loaded. A collective call.

        Raise :class:`UsageError` for the state of another number of ranks, another model, or other loss flags.
        """
        here = self._whole_identity()
        check_identity(state["identity"], here, "load_state_dict", "of make_lossy's state", "that state")
        self.restart(state["iteration"])
        self._load_state(state)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write :meth:`state_dict` of each rank into a file of its own in ``folder``. A collective call."""
        write(Path(folder, REPLICAS, self.replica_file()), self.state_dict())

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Restore :meth:`save`, after model and optimizer were loaded. A collective call.

        Raise :class:`UsageError` as :meth:`load_state_dict` does, and if ``folder`` has no such file.
        """
        self.load_state_dict(self._saved_in(folder))

    def error_of_missing(self, folder: str | os.PathLike, path: Path) -> UsageError:
        why = f"has no {path.relative_to(folder)}: it was saved without make_lossy's state"
        return refuse("checkpoint", folder, why)

    def restart(self, iteration: int = 0) -> None:
        """Begin again after ``iteration`` iterations, with replicas that are all equal: weights were loaded."""
        self.round.begin()
        self._exchanged = False
        self.set_iteration(iteration)

    def _whole_identity(self) -> dict[str, Any]:
        return ({"number of the model": self.number} if self.number else {}) | super()._whole_identity()

    # --- the end ---------------------------------------------------------------------------------------------------

    def close_observers(self) -> None:
        if not self._closed:
            self._closed = True
            super().close_observers()

    def close(self) -> None:
        """End the run: complete its records, and give the model torch's own exchanges again. A collective call."""
        atexit.unregister(self._at_exit)
        self._steps.close()
        _open.pop(self.number, None)
        self.restore_exchanges()
        self.uninstall()

    @abstractmethod
    def restore_exchanges(self) -> None:
        """Give the model the exchanges that it had before."""
