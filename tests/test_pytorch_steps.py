"""Steps that count as updates, and writes of weights that are noticed: FSDP2 and DDP over gloo."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

from megatron_lossy.config import LossyConfig
from megatron_lossy.pytorch import make_lossy
from tests import fsdp, test_pytorch_ddp
from tests.fsdp import Tiny, Training
from tests.test_pytorch import BOTH, RULES, same

pytestmark = pytest.mark.shows("FSDP2 and DDP: closures, scalers, nested and empty steps are counted rightly")

LEAD = dataclasses.replace(BOTH, param_send="compensated")


class Nested(torch.optim.AdamW):
    """Its step calls that of its class's parent: torch calls the hooks of both."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


class Twice(torch.optim.AdamW):
    """Evaluates its closure twice, and uses the gradients of the second time."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        return super().step(closure)


class Stepping(Training):
    """A training whose optimizer is of the given kind. ``how``: its arguments."""

    def __init__(self, config, kind=torch.optim.AdamW, make=make_lossy, **how):
        self.tiny = Tiny()
        self.model = fsdp.build(self.tiny)
        self.optimizer = kind(self.model.parameters(), lr=0.01, **how)
        self.lossy = make(self.model, self.optimizer, config)

    def end(self):
        weights = self.weights()
        counted = self.lossy.iteration, self.lossy.update
        self.lossy.close()
        return weights, counted


def closure_of(run, step):
    def evaluate():
        run.optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        return loss

    return evaluate


def by_closure(rank, config, kind, steps):
    run = Stepping(config, kind)
    losses = [run.optimizer.step(closure_of(run, step)).item() for step in range(steps)]
    return (run.end()[0], losses)


@pytest.mark.parametrize("config", [BOTH, LEAD], ids=["plain", "lead"])
def test_a_closure_gives_the_bits_of_a_loop(config, pool):
    same(pool.run(by_closure, 2, config, torch.optim.AdamW, 5), pool.run(fsdp.plain, 2, Tiny(), config, 5))


def twice_by_hand(rank, config, steps):
    run = Stepping(config)
    losses = []
    for step in range(steps):
        closure_of(run, step)()
        losses.append(closure_of(run, step)().item())
        run.optimizer.step()
    return (run.end()[0], losses)


@pytest.mark.parametrize("config", [BOTH, LEAD], ids=["plain", "lead"])
def test_a_closure_that_is_called_twice_makes_two_rounds_of_gradients(config, pool):
    same(pool.run(by_closure, 2, config, Twice, 4), pool.run(twice_by_hand, 2, config, 4))


def in_ddp_by_closure(rank, config, steps):
    run = test_pytorch_ddp.Training(config)
    losses = [run.optimizer.step(closure_of(run, step)).item() for step in range(steps)]
    weights = run.weights()
    run.lossy.close()
    return weights, losses


def test_a_closure_in_ddp_gives_the_bits_of_a_loop(pool):
    config = dataclasses.replace(test_pytorch_ddp.LOSSY, param_sync_interval=3)
    expected = pool.run(test_pytorch_ddp.plain, 2, config, 7, {})
    same(pool.run(in_ddp_by_closure, 2, config, 7), [run[:2] for run in expected])


def nested(rank, config, steps):
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # from now on torch calls hooks in the parent's step too
    run = Stepping(config, Nested)
    losses = [run.step(step) for step in range(steps)]
    weights, counted = run.end()
    assert counted == (steps, steps - 1)
    return weights, losses


@pytest.mark.parametrize("rule", RULES)
def test_a_step_within_a_step_is_one(rule, pool):
    config = dataclasses.replace(BOTH, grad_recovery=rule)
    same(pool.run(nested, 2, config, 5), pool.run(fsdp.plain, 2, Tiny(), config, 5))


def scaled(rank, config, fused, overflows, given):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    run = Stepping(config, make=functools.partial(make_lossy, scaler=scaler) if given else make_lossy, fused=fused)
    updates = run.scaled_steps(scaler, 6, overflows)
    return *run.end(), updates


def fused(rank, config, steps):
    run = Stepping(config, fused=True)
    losses = [run.step(step) for step in range(steps)]
    return run.end()[0], losses


@pytest.mark.parametrize(
    ("rule", "given"), [("renormalize", False), ("renormalize", True), ("previous", True), ("error-feedback", True)]
)
def test_a_kernel_that_skips_a_step_makes_no_update(rule, given, pool):
    config = dataclasses.replace(BOTH, grad_recovery=rule)
    plain = pool.run(fused, 2, config, 6)
    same([one[0] for one in pool.run(scaled, 2, config, True, (), given)], [one[0] for one in plain])
    apart = pool.run(scaled, 2, config, False, (2, 3), True)
    within = pool.run(scaled, 2, config, True, (2, 3), given)
    for (weights, counted, updates), (others, *_) in zip(within, apart, strict=True):
        assert updates == [0, 1, 1, 1, 4, 5]
        assert counted == (6, 5)
        for name, value in others.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def with_state_made(rank, kind, when, steps):
    run = Training(Tiny(), None)
    run.optimizer = kind(run.model.parameters(), lr=0.01)

    def states():
        parts = get_state_dict(run.model, run.optimizer)
        set_state_dict(run.model, run.optimizer, model_state_dict=parts[0], optim_state_dict=parts[1])

    if when == "before":
        states()
    run.lossy = make_lossy(run.model, run.optimizer, BOTH)
    if when == "after":
        states()
        assert (run.lossy.iteration, run.lossy.update) == (0, None)
    losses = []
    for step in range(steps):
        losses.append(run.step(step))
        if when == "after":
            get_optimizer_state_dict(run.model, run.optimizer)
    weights = {name: one.full_tensor().detach().numpy() for name, one in run.model.named_parameters()}
    assert run.lossy.iteration == steps
    run.lossy.close()
    return weights, losses


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_making_the_state_of_an_optimizer_is_no_update(kind, pool):
    before = pool.run(with_state_made, 2, kind, "before", 4)  # AdamW counts that step, and SGD nothing
    same(pool.run(with_state_made, 2, kind, "after", 4), before)
    if kind is torch.optim.SGD:
        same(before, pool.run(with_state_made, 2, kind, None, 4))


def idle(rank):
    run = Stepping(BOTH)
    seen = []

    def note(what):
        seen.append((what, run.lossy.iteration, run.lossy.update))

    run.optimizer.step()
    note("nothing")
    run.step(0)
    note("first")
    with torch.no_grad():
        run.loss(1)
    run.optimizer.step()
    note("evaluated")
    for group in run.optimizer.param_groups:
        group["lr"] = torch.tensor(0.0) if run.lossy.iteration > 1 else 0.0
    sent = dict(run.lossy.sent_bytes)
    run.step(1)
    note("no learning rate")
    run.loss(2)
    assert run.lossy.sent_bytes["param"] == sent["param"]  # the weights are those that were gathered
    run.optimizer.param_groups[0]["lr"] = 0.01
    run.step(2)
    note("third")
    run.lossy.close()
    return seen


def test_steps_without_gradients_or_learning_rate_are_no_updates(pool):
    counted = [("nothing", 0, None), ("first", 1, 0), ("evaluated", 1, 0), ("no learning rate", 2, 0), ("third", 3, 2)]
    assert pool.run(idle, 2) == [counted, counted]


def broken_off(rank, config, steps):
    run = Stepping(config)
    losses = []

    def fails():
        raise ZeroDivisionError

    for step in range(steps):
        with pytest.raises(ZeroDivisionError):
            run.optimizer.step(fails)
        losses.append(run.step(step))
    return (run.end()[0], losses)


def test_a_step_that_raises_an_error_is_no_update(pool):
    same(pool.run(broken_off, 2, BOTH, 4), pool.run(fsdp.plain, 2, Tiny(), BOTH, 4))


def halves(rank, config, idle):
    run = Training(Tiny(), None)
    own = list(run.model.parameters())
    optimizers = [torch.optim.AdamW(part, lr=0.01) for part in (own[:5], own[5:])]
    run.lossy = make_lossy(run.model, optimizers, config)
    counted, losses = [], []
    for step in range(4):
        loss = run.loss(step)
        loss.backward()
        losses.append(loss.item())
        for number, optimizer in enumerate(optimizers):
            if (number, step) in idle:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        counted.append((run.lossy.iteration, run.lossy.update))
    run.lossy.close()
    return counted, losses


def test_one_of_several_optimizers_may_have_nothing_to_do(pool):
    expected = [(1, 0), (2, 1), (3, 1), (4, 3)]
    found = pool.run(halves, 2, BOTH, {(0, 1), (0, 2), (1, 2), (1, 3)})
    assert [counted for counted, _ in found] == [expected] * 2


def test_several_optimizers_make_one_update(pool):
    expected = pool.run(fsdp.plain, 2, Tiny(), BOTH, 4)
    assert pool.run(halves, 2, BOTH, ()) == [
        ([(step + 1, step) for step in range(4)], losses) for _, losses in expected
    ]


def wrapped(rank, config, steps):
    class Wrapper(torch.optim.SGD):
        """An optimizer with hooks of its own that has another one inside, and does more than that."""

        def __init__(self, optimizer):
            super().__init__(optimizer.param_groups, lr=0.01)
            self.optimizer = optimizer

        @torch.no_grad()
        def step(self, closure=None):
            self.optimizer.step()
            for group in self.param_groups:
                for one in group["params"]:
                    one.mul_(0.99)

    run = Training(Tiny(), None)
    inner, run.optimizer = run.optimizer, Wrapper(run.optimizer)
    run.lossy = make_lossy(run.model, run.optimizer, config)
    with fsdp.trained(run, range(steps)):
        return run.lossy.iteration, run.lossy.update, len(inner.state) > 0


def test_an_optimizer_that_drives_another_is_the_one_that_counts(pool):
    assert pool.run(wrapped, 2, BOTH, 4) == [(4, 3, True)] * 2


ALWAYS = LossyConfig(p_param=0.6, loss_unit="bucket")


def written(rank, when):
    run = Stepping(ALWAYS)
    for step in range(3):
        run.step(step)
    if when == "before a step":
        run.loss(3).backward()
    with torch.no_grad():
        for one in run.model.parameters():
            one.fill_(100.0)
    with pytest.raises(
        RuntimeError, match="were written, and not by a step of the optimizer that has ended: call weights_changed"
    ):
        if when == "before a step":
            run.optimizer.step()
        else:
            run.loss(3)
    run.lossy.weights_changed()
    run.model.reset_iter_state()
    run.lossy.settle()
    values = {float(value) for replica in run.replicas() for value in np.unique(replica)}
    run.lossy.close()
    return values


@pytest.mark.parametrize("when", ["after a step", "before a step"])
def test_weights_that_nobody_spoke_of_are_an_error(when, pool):
    assert all(values <= {0.0, 100.0} for values in pool.run(written, 2, when))  # 0 is padding


def part_loaded(rank):
    run = Stepping(ALWAYS)
    first = {name: value.detach().clone() for name, value in run.model[1].state_dict().items()}
    inner = {name: value.detach().clone() for name, value in run.model[2].up.state_dict().items()}
    for step in range(3):
        run.step(step)
    run.model[1].load_state_dict(first)
    run.model[2].up.load_state_dict(inner)
    run.lossy.settle()
    replicas = run.replicas()
    run.step(4)
    run.lossy.close()
    return replicas


def test_a_part_that_is_loaded_is_gathered_reliably(pool):
    first, second = pool.run(part_loaded, 2)
    for one, other in itertools.zip_longest(first, second):
        np.testing.assert_array_equal(one, other)
