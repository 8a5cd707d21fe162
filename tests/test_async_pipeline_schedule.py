"""The order of an asynchronous pipeline's passes, and the versions of its weights: pure, without ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.lab.async_pipeline.stage import Stage, Stash

pytestmark = pytest.mark.shows("each pass has the weights that PipeDream gives it")

PIPES = dict(
    stages=st.integers(1, 6), iterations=st.integers(1, 9), micro_batches=st.integers(1, 3), start=st.integers(0, 8)
)


def program(stage, iterations, micro_batches, start, full=False):
    """Return the passes of ``stage`` by iteration, from ``start`` on."""
    result = []
    forwarded = received = start
    if full:
        forwarded = stage.filled(start, iterations)
        received = min(forwarded + 1, iterations)
    for iteration in range(start, iterations):
        result.append(list(stage.passes(iteration, iterations, micro_batches, forwarded, received)))
        forwarded = stage.filled(iteration + 1, iterations)
        received = min(forwarded + 1, iterations)
    return result


@settings(deadline=None)
@given(**PIPES, full=st.booleans())
def test_every_batch_has_the_version_that_pipedream_gives_it(stages, iterations, micro_batches, start, full):
    start %= iterations
    every = [(batch, micro) for batch in range(start, iterations) for micro in range(micro_batches)]
    for number in range(stages):
        stage = Stage(number, stages)
        done = program(stage, iterations, micro_batches, start, full)
        delay = stages - 1 - number
        ahead = start + delay if full else start
        assert [(one.batch, one.micro) for passes in done for one in passes if one.kind == "backward"] == every
        forward = [(one.batch, one.micro) for passes in done for one in passes if one.kind == "forward"]
        assert forward == [place for place in every if place[0] >= ahead]
        for updates, passes in enumerate(done, start):
            for one in passes:
                if one.kind == "forward" and (full or not start):
                    assert updates == max(0, one.batch - delay)
                if one.kind == "backward":
                    assert updates == one.batch


@settings(deadline=None)
@given(**PIPES)
def test_between_iterations_no_message_is_under_way(stages, iterations, micro_batches, start):
    start %= iterations
    for number in range(stages - 1):
        one, other = (program(Stage(n, stages), iterations, micro_batches, start) for n in (number, number + 1))
        for here, there in zip(one, other, strict=True):
            names = {"forward": "activations", "receive": "activations", "backward": "gradient"}
            sent = [(names[p.kind], p.batch, p.micro) for p in here if p.kind != "receive"]
            received = [(names[p.kind], p.batch, p.micro) for p in there if p.kind != "forward"]
            assert sent == received


@pytest.mark.parametrize("of", ["a pair", "a rank"])
@settings(deadline=None)
@given(**PIPES)
def test_nobody_waits_for_ever_where_messages_run_one_after_another(of, stages, iterations, micro_batches, start):
    """As NCCL runs them: a message is over when both ends have begun it and all earlier ones of the pair, or of each rank."""
    start %= iterations
    counts, queues, done = {}, {}, set()  # begun by (stage, neighbour); not yet over, in order, by end

    def ends(low, high, _):
        return [(low, high), (high, low)] if of == "a pair" else [low, high]

    def first_everywhere(message):
        return all(queues.get(end, [None])[:1] == [message] for end in ends(*message))

    def over(message):
        while ready := [queue[0] for queue in queues.values() if queue and first_everywhere(queue[0])]:
            for end in ends(*ready[0]):
                queues[end].pop(0)
            done.add(ready[0])
        return message in done

    def run(number):
        stage, inputs = Stage(number, stages), []

        def begin(neighbour):
            index = counts[number, neighbour] = counts.get((number, neighbour), -1) + 1
            message = (*sorted((number, neighbour)), index)
            queues.setdefault((number, neighbour) if of == "a pair" else number, []).append(message)
            return message

        for passes in program(stage, iterations, micro_batches, start):
            everything = []
            for one in passes:
                if one.kind == "receive":
                    inputs.append(begin(number - 1))
                elif one.kind == "forward":
                    if not stage.first:
                        yield inputs.pop(0)
                    if not stage.last:
                        everything.append(begin(number + 1))
                else:
                    if not stage.last:
                        yield begin(number + 1)
                    if not stage.first:
                        everything.append(begin(number - 1))
            yield from everything + inputs

    running = {number: run(number) for number in range(stages)}
    waiting = dict.fromkeys(running)
    while running:
        moved = False
        for number in list(running):
            while waiting[number] is None or over(waiting[number]):
                moved = True
                waiting[number] = next(running[number], "end")
                if waiting[number] == "end":
                    del running[number]
                    break
        assert moved, waiting


class Layers(torch.nn.Module):
    """Two matrices and a vector; the second matrix is used through a view, which autograd keeps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a = torch.nn.Parameter(torch.randn(4, 3))
        self.b = torch.nn.Parameter(torch.randn(2, 4))
        self.c = torch.nn.Parameter(torch.randn(3))

    def forward(self, x):
        return torch.tanh((x * self.c) @ self.a.t()) @ self.b.view(2, 4).t()


def gradients(layers, x, output=None):
    output = layers(x) if output is None else output
    return torch.autograd.grad(output.square().sum(), [x, *layers.parameters()])


def test_backward_has_the_weights_of_its_forward_pass():
    layers, x = Layers(), torch.randn(5, 3, requires_grad=True)
    expected = gradients(layers, x)
    stash = Stash(layers.parameters())
    first = stash.newest()
    with stash.using(first):
        output = layers(x)
    own = [parameter.data_ptr() for parameter in layers.parameters()]
    with torch.no_grad(), stash.updating():
        for parameter in layers.parameters():
            parameter.view(-1)[:].mul_(2)  # a view, as Megatron's shards in float32 are
    second = stash.newest()
    with stash.using(first):
        found = gradients(layers, x, output)
    assert all(torch.equal(one, other) for one, other in zip(expected, found))
    assert own == [parameter.data_ptr() for parameter in layers.parameters()]
    assert all(torch.equal(p, v) for p, v in zip(layers.parameters(), second.views))
    assert not torch.equal(gradients(layers, x)[0], expected[0])


def test_without_a_stash_input_gradients_have_the_newest_weights():
    layers, x = Layers(), torch.randn(5, 3, requires_grad=True)
    stash = Stash(layers.parameters())
    with stash.using(None):
        hidden = torch.tanh((x * layers.c) @ layers.a.t())
        output = hidden @ layers.b.t()
    with torch.no_grad(), stash.updating():
        layers.b.view(-1).mul_(2)
    at_x, _, at_b, _ = gradients(layers, x, output)
    kept = output.detach()  # of the forward pass, at the old weights
    at_hidden = 2 * kept @ layers.b
    assert torch.allclose(at_b, 2 * kept.t() @ hidden)
    assert torch.allclose(at_x, (at_hidden * (1 - hidden**2)) @ layers.a * layers.c)


def test_a_released_version_is_used_again_and_a_saved_one_comes_back():
    layers = Layers()
    stash = Stash(layers.parameters())
    version = stash.newest()
    saved = [flat.clone() for flat in stash.state_dict(version)]
    before = layers.a.detach().clone()
    memory = [view.data_ptr() for view in version.views]
    stash.release(version)
    with torch.no_grad():
        layers.a.add_(1)
    assert [view.data_ptr() for view in stash.newest().views] == memory
    restored = stash.restored(saved)
    assert torch.equal(restored.views[0], before) and torch.equal(restored.views[2], layers.c)
