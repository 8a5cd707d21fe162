"""Error feedback on real ranks over gloo: what the closed forms of docs/smart.md say, measured in what owners are given.

Seeds are fixed. Statistics may be five standard errors off, which chance exceeds once in two million.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import BucketSpec, LossyGroup, lossy_reduce_scatter
from tests.ranks import run_ranks
from tests.rules import gradients

pytestmark = pytest.mark.shows("error feedback on ranks: weights, variance, residual against theory, memory")

RANKS, UNITS, P = 4, 20_000, 0.3
#: A loss 40 steps ago is still kept in one of 10^20 units.
STEPS = 40
#: A sender's gradient is this to the power of its rank, so that its weight is a digit of the sum; all are exact in float32.
BASE = 64


def config_of(transport="torch", **flags):
    return LossyConfig(loss_unit="packet", grad_recovery="error-feedback", transport=transport, **flags)


def kept_of(rule, size):
    """Return the residual that ``rule`` would add to the next gradient, [size]."""
    kept = torch.zeros(size)
    rule.correct(kept, gradients())
    return kept


def constant_gradients(rank, transport):
    """Return every sender's weight at this owner in the last step [N, units]; the kept part of ones [N, units]."""
    config = config_of(transport, p_grad=P, packet_bytes=4, grad_priority="none")
    group = LossyGroup.create(config, [BucketSpec(UNITS)])
    output = torch.empty(UNITS)
    for step in range(STEPS):
        gradient = torch.full((RANKS * UNITS,), float(BASE**rank))
        lossy_reduce_scatter(group, 0, output, gradient, step)
        group.finish_step(step, True)
    left, weights = output.long().numpy(), []
    for _ in range(RANKS):
        weights.append(left % BASE)
        left = left // BASE
    assert not left.any()
    kept = kept_of(group.grads[0], RANKS * UNITS) / BASE**rank
    return np.array(weights), kept.view(RANKS, UNITS).numpy()


def close(values, expected, what):
    """Return whether the mean of independent ``values`` is ``expected`` up to five standard errors."""
    error = values.std() / np.sqrt(values.size)
    assert error > 0 and abs(values.mean() - expected) < 5 * error, (what, values.mean(), error, float(expected))


@pytest.fixture(scope="module", params=["torch", "pieces"])
def constant(request):
    return run_ranks(constant_gradients, RANKS, request.param)


def test_the_weights_of_what_is_applied(constant):
    """An own gradient has weight 1. Another's is 0 with probability p; k, after k - 1 losses, with q^2 p^(k-1)."""
    q = 1 - P
    for owner, (weights, _) in enumerate(constant):
        assert (weights[owner] == 1).all()
    others = np.concatenate([np.delete(weights, owner, axis=0) for owner, (weights, _) in enumerate(constant)])
    close((others == 0).ravel(), P, "lost")
    for k in range(1, 6):
        close((others == k).ravel(), q * q * P ** (k - 1), f"weight {k}")
    close(others.ravel(), 1.0, "mean weight")
    close((others.ravel() - 1.0) ** 2, 2 * P / q, "variance of a weight")


def test_the_mean_of_what_is_kept(constant):
    for sender, (_, kept) in enumerate(constant):
        assert not kept[sender].any()
    others = np.concatenate([np.delete(kept, sender, axis=0) for sender, (_, kept) in enumerate(constant)])
    close(others.ravel().astype(np.float64), P / (1 - P), "kept")
    close((others == 0).ravel(), 1 - P, "nothing kept")


# --- what is applied and what is kept are all that was given --------------------------------------------------------


def unfinished(rank, config, steps, rejected=()):
    """Return, of integers: given less applied less kept; kept; units lost; unread reports. Two steps have no gradients."""
    size, shard = dist.get_world_size(), 5000
    group = LossyGroup.create(config, [BucketSpec(shard)])
    generator = torch.Generator().manual_seed(rank)
    buffer, output = torch.empty(size * shard), torch.empty(shard)
    given, applied, lost = torch.zeros(size * shard), torch.zeros(shard), 0
    for step in range(steps + 2):
        gradient = torch.randint(-9, 10, (size * shard,), generator=generator).float() * (step < steps)
        buffer.copy_(gradient)
        lossy_reduce_scatter(group, 0, output, buffer, step)
        buffer.fill_(torch.nan)
        lost += sum(told.left for told in group.told())
        if step in rejected:
            group.finish_step(step, False)
            continue
        given += gradient
        applied += output
    group.state_dict()
    kept = kept_of(group.grads[0], size * shard)
    given -= kept
    dist.all_reduce(given)
    difference = float((given[rank * shard : (rank + 1) * shard] - applied).abs().max())
    unreported = len(getattr(group.wire, "_unreported", ()))
    group.close()
    return difference, int(kept.count_nonzero()), lost, unreported


@pytest.mark.parametrize("rejected", [(), (3, 4, 9)])
@pytest.mark.parametrize("transport", ["torch", "pieces"])
def test_the_public_collectives_need_nobody_who_finishes_a_step(transport, rejected):
    """Bit for bit, over integers; steps of which somebody says that they do not count do not."""
    config = config_of(transport, packet_bytes=64, grad_priority="none", loss_schedule=("0:0.5,20:0",))
    for difference, kept, lost, _ in run_ranks(unfinished, 2, config, 20, rejected):
        assert difference == kept == 0 and lost > 1000


def kept_after(rank, acts):
    """Elements that are kept after one step and what ``acts`` name."""
    group = LossyGroup.create(config_of(p_grad=0.9, packet_bytes=64, grad_priority="none"), [BucketSpec(5000)])
    lossy_reduce_scatter(group, 0, torch.empty(5000), torch.ones(10000), 0)
    for act in acts:
        getattr(group, act)()
    return int(kept_of(group.grads[0], 10000).count_nonzero())


def test_a_step_that_nobody_finished_counts_when_its_state_is_saved_and_at_the_end():
    assert run_ranks(kept_after, 2, []) == [0, 0]
    for acts in (["state_dict"], ["close"]):
        assert min(run_ranks(kept_after, 2, acts)) > 3000
    assert run_ranks(kept_after, 2, ["restart", "state_dict"]) == [0, 0]


# --- memory ----------------------------------------------------------------------------------------------------------

SHARD, PACKET, FRACTION = 2048 * 256, 1024, 0.1


def memory(rank):
    """Bytes of the rule's tensors over those of the buffer: after an exchange, and after the step; and of their indices."""
    config = config_of(p_grad=P, packet_bytes=PACKET, grad_priority=f"packet-mean:{FRACTION}")
    group = LossyGroup.create(config, [BucketSpec(SHARD)])
    rule, output = group.grads[0].rule, torch.empty(SHARD)
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        gradient = torch.randn(RANKS * SHARD, generator=generator)
        lossy_reduce_scatter(group, 0, output, gradient, step)
        between = bytes_of(rule)
        group.finish_step(step, True)
    whole = gradient.numel() * gradient.element_size()
    return [part / whole for part in (*between, *bytes_of(rule))]


def bytes_of(rule):
    """Bytes of values, and of their places, in all tensors that ``rule`` holds besides its arguments."""
    found = [saved for _, saved in rule._residuals] + ([rule._pending[2]] if rule._pending else [])
    tensors = {id(part): part for saved in found for parts in saved for part in parts}.values()
    sizes = [(part.is_floating_point(), part.untyped_storage().nbytes()) for part in tensors]
    return [sum(size for values, size in sizes if values == wanted) for wanted in (True, False)]


def test_the_memory_of_what_is_kept_follows_the_loss():
    """p (1 - K) (N-1)/N of the gradient buffer, and until the choice of a step is on the host p (N-1)/N more."""
    results = np.array(run_ranks(memory, RANKS))
    share = P * (1 - FRACTION) * (RANKS - 1) / RANKS
    packets = RANKS * (RANKS - 1) * SHARD * 4 // PACKET  # of all ranks that others get
    error = np.sqrt((1 - P) / (P * (1 - FRACTION) * packets))  # of a share, relative
    between, places, after, _ = results.mean(axis=0)
    assert abs(after / share - 1) < 5 * error and error < 0.02
    assert abs(between / (share + share / (1 - FRACTION)) - 1) < 5 * error
    assert places < 0.02 * between
