"""Lossy stage boundaries on the real megatron-core over gloo, message by message, and in one process."""

import copy
import dataclasses
import functools
import inspect
import zlib

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.transformer import torch_norm

from megatron_lossy import hooks
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.refusal import check_refusals
from megatron_lossy.hooks.facts import of_communicator
from megatron_lossy.hooks.versions import decoder_layers
from megatron_lossy.mechanisms.boundaries.hooks import StageBoundaries
from megatron_lossy.mechanisms.boundaries.messages import Boundary
from tests import contract
from tests.boundaries import boundary_lost
from tests.contract import made
from tests.ranks import logged, run_ranks
from tests.rules import assert_same
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows(
    "every message by value: both directions, interleaved, TP 2, sequences",
    "stages are one process with virtual boundaries, bit for bit",
)

#: Activations of the tiny model are 1,024 values: 21 packets, the last one short.
BOTH = LossyConfig(p_act=0.3, p_act_grad=0.2, packet_bytes=200, act_fec=("4,2,0.15", "6,1,0.3", "0.5"))
OFF = LossyConfig(p_act=0.3, p_act_grad=0.2, packet_bytes=200, act_fec=("off",))
PLAIN = TinyGPT(pipeline=2, accumulation=3, tied=False)
DEEP = TinyGPT(pipeline=2, virtual=2, layers=4, accumulation=4, tied=False)


def record(rank, tiny, config, steps=2, model=None, evaluate=None):
    """Train, and note what enters and leaves each stage.

    ``model``: settings of Megatron's model, once it is built. ``evaluate``: "no_grad" or "grad", a forward pass before each
    step. Return by iteration, and under (iteration, "evaluation"), by (stage, micro-batch): ``out`` and ``in`` of
    activations, ``grad_in`` of the output's gradient, ``grad_out`` of the input's. Stages are numbered through the model.
    """
    lossy = hooks.install(config)
    if tiny.sequence_parallel:
        allow_sequence_parallel_norms()
    run = build(tiny)
    for name, value in (model or {}).items():
        setattr(run.transformer, name, value)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    notes, places = {}, {}

    def numpy(tensor):
        tensor = tensor[0] if isinstance(tensor, list | tuple) else tensor
        return None if tensor is None else tensor.detach().float().numpy().copy()

    forward, backward = schedules.forward_step, schedules.backward_step

    def forward_step(*args, **kwargs):
        given = inspect.signature(forward).bind(*args, **kwargs).arguments
        result = forward(*args, **kwargs)
        chunk = run.model.index(given["model"])
        place = (chunk * tiny.pipeline + stage, given["current_microbatch"])
        notes["in"][place], notes["out"][place] = numpy(given["input_tensor"]), numpy(result[0])
        output = result[0][0] if isinstance(result[0], list) else result[0]
        places[id(output)] = place, output
        return result

    def backward_step(input_tensor, output_tensor, output_tensor_grad, *args, **kwargs):
        output = output_tensor[0] if isinstance(output_tensor, list) else output_tensor
        place, _ = places.pop(id(output))
        notes["grad_in"][place] = numpy(output_tensor_grad)
        result = backward(input_tensor, output_tensor, output_tensor_grad, *args, **kwargs)
        notes["grad_out"][place] = numpy(result)
        return result

    schedules.forward_step, schedules.backward_step = forward_step, backward_step
    recorded = {}
    for step in range(steps):
        if evaluate:
            notes = recorded[step, "evaluation"] = {"in": {}, "out": {}}
            with torch.no_grad() if evaluate == "no_grad" else torch.enable_grad():
                run.evaluate(step)
        notes = recorded[step] = {"in": {}, "out": {}, "grad_in": {}, "grad_out": {}}
        run.step(step)
    metrics = lossy.metrics()
    schedules.forward_step, schedules.backward_step = forward, backward
    lossy.uninstall()
    return {
        "stage": stage,
        "rank": parallel_state.get_data_parallel_rank(),
        "tensor": parallel_state.get_tensor_model_parallel_rank() if tiny.sequence_parallel else 0,
        "recorded": recorded,
        "metrics": metrics,
    }


def allow_sequence_parallel_norms():
    """Torch's norms are refused with sequence parallelism, since their gradients are not added up; here that is no matter."""
    new = torch_norm.WrappedTorchNorm.__new__

    def plain(cls, config, *args, **kwargs):
        config = copy.copy(config)
        config.sequence_parallel = False
        return new(cls, config, *args, **kwargs)

    torch_norm.WrappedTorchNorm.__new__ = plain


def by_replica(ranks):
    """Return the joint record of the stages of each pipeline: (data rank, tensor rank of the link) and the record."""
    pipelines = {}
    for one in ranks:
        whole = pipelines.setdefault((one["rank"], one["tensor"]), {})
        for when, notes in one["recorded"].items():
            for name, values in notes.items():
                whole.setdefault(when, {}).setdefault(name, {}).update(values)
    return pipelines


def place_of(stage, tiny):
    """The boundary before a stage."""
    stages = tiny.pipeline * (tiny.virtual or 1)
    return Boundary(stage % tiny.pipeline, stage * tiny.layers // stages, tiny.layers, stage // tiny.pipeline)


def check(ranks, tiny, config, steps=2, itemsize=4):
    """Every message by value. Return how many packets were zero-filled in each phase."""
    elements = config.packet_bytes // itemsize
    zeros = {"act": 0, "act-grad": 0}
    stages = tiny.pipeline * (tiny.virtual or 1)
    for (rank, tensor), recorded in by_replica(ranks).items():
        for step in range(steps):
            notes = recorded[step]
            for stage in range(1, stages):
                boundary = place_of(stage, tiny)
                for number in range(tiny.accumulation):
                    here, before = (stage, number), (stage - 1, number)
                    sent, got = notes["out"][before], notes["in"][here]
                    packets = -(-sent.size // elements)
                    earlier = [-(-notes["out"][stage - 1, one].size // elements) for one in range(number)]
                    lost = {
                        phase: np.repeat(
                            boundary_lost(config, phase, boundary, rank, tensor, step, number, packets, earlier),
                            elements,
                        )[: sent.size].reshape(sent.shape)
                        for phase in zeros
                    }
                    np.testing.assert_array_equal(got, np.where(lost["act"], 0, sent))
                    back, came = notes["grad_out"][here], notes["grad_in"][before]
                    np.testing.assert_array_equal(came, np.where(lost["act-grad"], 0, back))
                    assert not back[lost["act"]].any()
                    assert back[~lost["act"]].any() and sent.any()
                    for phase, mask in lost.items():
                        zeros[phase] += int(mask.sum())
    return zeros


WAYS = {
    "batched": (2, PLAIN, {}),
    "one by one": (2, PLAIN, {"batch_p2p_comm": False}),
    "two replicas, bf16": (4, TinyGPT(pipeline=2, accumulation=2, dtype="bf16"), {}),
    "three stages": (3, TinyGPT(pipeline=3, layers=3, accumulation=4, tied=False), {}),
    "interleaved, overlapped": (2, DEEP, {}),
    "of different lengths": (2, TinyGPT(pipeline=2, accumulation=4, tied=False, lengths=(16, 5, 15)), {}),
    "interleaved, groups of three": (
        2,
        TinyGPT(pipeline=2, virtual=2, layers=4, accumulation=5, tied=False),
        {"microbatch_group_size_per_vp_stage": 3},
    ),
    "interleaved, three chunks": (2, TinyGPT(pipeline=2, virtual=3, layers=6, accumulation=2, tied=False), {}),
}


@pytest.mark.parametrize("name", WAYS)
def test_every_message_loses_what_is_drawn_for_it(name, pool):
    """Under every schedule, chunk and micro-batch are those that Megatron computes with."""
    world, tiny, model = WAYS[name]
    config = BOTH
    zeros = check(pool.run(record, world, tiny, config, 2, model), tiny, config, itemsize=2 if "bf16" in name else 4)
    assert zeros["act"] and zeros["act-grad"]


def test_without_recovery(pool):
    zeros = check(pool.run(record, 2, PLAIN, OFF), PLAIN, OFF)
    assert zeros["act"] and zeros["act-grad"]


def test_one_direction_alone(pool):
    for flags, phase in (({"p_act": 0.0}, "act-grad"), ({"p_act_grad": 0.0}, "act")):
        config = LossyConfig(**vars(BOTH) | flags)
        zeros = check(pool.run(record, 2, PLAIN, config), PLAIN, config)
        assert [name for name, count in zeros.items() if count] == [phase]


def test_beside_lost_gradients_and_parameters(pool):
    config = LossyConfig(**vars(BOTH) | {"p_grad": 0.4, "p_param": 0.4})
    tiny = TinyGPT(
        pipeline=2, accumulation=2, tied=False, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=3000
    )
    contract.check(pool.run(contract.record, 4, tiny, config, 3), config, loses=True)
    ranks = pool.run(record, 4, tiny, config)
    assert check(ranks, tiny, config)["act"]


@pytest.mark.parametrize("tiny", [PLAIN, DEEP], ids=["plain", "interleaved"])
def test_beyond_the_bound_nothing_is_lost(tiny, pool, unhooked):
    """All that the parity does not bring back is sent again: to the last bit it is Megatron."""
    config = LossyConfig(**vars(BOTH) | {"act_fec": ("4,2,0", "6,1,0", "0.5")})
    assert_same(pool.run(contract.plain, 2, tiny, config, 3), unhooked.run(contract.plain, 2, tiny, None, 3))


@pytest.mark.parametrize("grad", ["no_grad", "grad"])
def test_evaluation_is_reliable_unless_asked_otherwise(grad, pool):
    """Also of a schedule that runs forward only where gradients are enabled; training loses as without it."""
    elements = BOTH.packet_bytes // 4
    for in_eval in (False, True):
        config = LossyConfig(**vars(BOTH) | {"act_loss_in_eval": in_eval})
        ranks = pool.run(record, 2, PLAIN, config, 2, None, grad)
        check(ranks, PLAIN, config)
        [recorded] = by_replica(ranks).values()
        zeros = 0
        for step in range(2):
            notes = recorded[step, "evaluation"]
            for number in range(PLAIN.accumulation):
                sent, got = notes["out"][0, number], notes["in"][1, number]
                lost = boundary_lost(config, "act", place_of(1, PLAIN), 0, 0, step, number, -(-sent.size // elements))
                lost = np.repeat(lost & in_eval, elements)[: sent.size].reshape(sent.shape)
                np.testing.assert_array_equal(got, np.where(lost, 0, sent))
                zeros += lost.sum()
        assert bool(zeros) == in_eval


def test_boundaries_within_a_node_are_reliable():
    """Only the second boundary of four stages on two nodes leaves a node."""
    tiny = TinyGPT(pipeline=4, layers=4, accumulation=2, tied=False)
    config = LossyConfig(**vars(BOTH) | {"lossy_links": "inter-node:2"})
    ranks = run_ranks(record, 4, tiny, config)
    [recorded] = by_replica(ranks).values()
    for step in range(2):
        for number in range(2):
            for stage in range(1, 4):
                notes = recorded[step]
                equal = np.array_equal(notes["out"][stage - 1, number], notes["in"][stage, number])
                back = np.array_equal(notes["grad_out"][stage, number], notes["grad_in"][stage - 1, number])
                assert (equal and back) or stage == 2
    assert any(
        not np.array_equal(recorded[step]["out"][1, number], recorded[step]["in"][2, number])
        for step in range(2)
        for number in range(2)
    )


def warnings_of(rank, tiny, config):
    said = logged("megatron_lossy.mechanisms.boundaries.hooks")
    hooks.install(config)
    build(tiny)
    return said


def test_it_is_said_that_a_pipeline_on_one_node_loses_nothing():
    config = LossyConfig(**vars(BOTH) | {"lossy_links": "inter-node:1"})
    assert run_ranks(warnings_of, 2, PLAIN, config) == [[], []]
    tiny = TinyGPT(tensor=1, pipeline=2, tied=False)
    # Ranks 0 and 2 are a pipeline, and 1 and 3.
    config = LossyConfig(**vars(BOTH) | {"lossy_links": "inter-node:3"})
    said = run_ranks(warnings_of, 4, tiny, config)
    line = "nothing is lost between the stages on ranks [0, 2]: they are on one node (--lossy-links inter-node)"
    assert said == [[line], [], [], []]


def test_tensor_parallel_peers_lose_the_same():
    ranks = run_ranks(record, 4, TinyGPT(tensor=2, pipeline=2, accumulation=2, tied=False), BOTH)
    for one, other in ((ranks[0], ranks[1]), (ranks[2], ranks[3])):
        for step in range(2):
            for name in ("in", "grad_in"):
                assert_same(one["recorded"][step][name], other["recorded"][step][name])


def test_with_sequence_parallelism_each_peer_has_losses_of_its_own():
    tiny = TinyGPT(tensor=2, pipeline=2, accumulation=2, tied=False, sequence_parallel=True)
    zeros = check(run_ranks(record, 4, tiny, BOTH), tiny, BOTH)
    assert zeros["act"] and zeros["act-grad"]


def test_metrics_count_what_was_lost(pool):
    ranks = pool.run(record, 2, PLAIN, BOTH, 8)
    metrics = ranks[0]["metrics"]
    assert metrics == ranks[1]["metrics"]
    zeros = check(ranks, PLAIN, BOTH, 8)
    sent = 8 * PLAIN.accumulation * 21
    for phase, rate in (("act", 0.3), ("act-grad", 0.2)):
        assert abs(metrics[f"loss rate {phase}"] - rate) < 4 * np.sqrt(rate * (1 - rate) / sent)
        assert metrics[f"retransmitted share {phase}"] > 0
        of_whole_packets = metrics[f"zero share {phase}"] * sent * 50  # the last one is shorter
        assert of_whole_packets >= zeros[phase] > 0.9 * of_whole_packets


def global_name(name, chunk):
    parts = name.removeprefix("module.").removeprefix("module.").split(".")
    if "layers" in parts:
        place = parts.index("layers") + 1
        parts[place] = str(decoder_layers(chunk)[int(parts[place])].layer_number - 1)
    return ".".join(parts)


def named(run):
    return [(global_name(name, chunk), p) for chunk in run.model for name, p in chunk.module.named_parameters()]


def trained(rank, tiny, config, steps, stages=None, workers=None):
    """Losses, and the weights by their name in the whole model, from initial weights that depend on the name."""
    if stages is not None:
        StageBoundaries.add_layers = functools.partialmethod(StageBoundaries.add_layers, stages=stages)
    with made(tiny, config, workers) as (run, _):
        with torch.no_grad():
            for name, parameter in named(run):
                if parameter.dim() > 1:
                    random = np.random.default_rng(zlib.crc32(name.encode()))
                    parameter.copy_(torch.from_numpy(random.normal(0, 0.1, parameter.shape)))
        losses = [run.step(step)["loss"] for step in range(steps)]
    return losses, {name: parameter.detach().float().numpy().copy() for name, parameter in named(run)}


def whole(results):
    """Return, of several stages, the losses of the last one, and the weights of all."""
    weights = {}
    for _, part in results:
        weights |= part
    return [loss for loss, _ in results if loss[0] is not None], weights


@pytest.mark.parametrize(
    ("real", "pipeline", "chunks", "accumulation", "boundaries"),
    [(BOTH, 2, None, 3, (2,)), (OFF, 2, None, 3, (2,)), (BOTH, 4, None, 2, (1, 2, 3)), (BOTH, 2, 2, 4, (3, 1, 2))],
    ids=["parity", "off", "four stages", "interleaved"],
)
def test_stages_are_one_with_virtual_boundaries(real, pipeline, chunks, accumulation, boundaries, pool):
    """Bit for bit, with the same draws."""
    tiny = TinyGPT(layers=4, accumulation=accumulation, tied=False, clip_grad=0.0)
    staged = dataclasses.replace(tiny, pipeline=pipeline, virtual=chunks)
    [losses], weights = whole(pool.run(trained, pipeline, staged, real, 4))
    virtual, run = dataclasses.replace(real, virtual_boundaries=boundaries), run_ranks if chunks else pool.run
    [(expected, all_weights)] = run(trained, 1, tiny, virtual, 4, chunks)
    assert_same((losses, weights), (expected, all_weights))
    [(lossless, _)] = pool.run(trained, 1, tiny, LossyConfig(), 4)
    assert lossless != losses


def test_virtual_workers_lose_what_ranks_lose(pool):
    config = LossyConfig(**vars(BOTH) | {"virtual_boundaries": (1,), "p_grad": 0.3, "p_param": 0.3})
    tiny = TinyGPT(accumulation=2)
    real = pool.run(trained, 2, tiny, config, 3)
    [(losses, _)] = pool.run(trained, 1, tiny, config, 3, None, 2)
    assert [list(step) for step in losses] == [list(step) for step in zip(*(losses for losses, _ in real))]


def evaluated(rank, config, workers=None):
    losses = []
    with made(TinyGPT(), config, workers) as (run, lossy):
        for worker in range(workers or 1):
            if workers:
                run._worker = worker
            with torch.no_grad(), lossy.data_of(worker) if workers else torch.no_grad():
                losses.append(run.evaluate(0))
    return losses


def test_evaluation_of_virtual_workers(pool):
    without = [losses[0] for losses in pool.run(evaluated, 2, LossyConfig())]
    for in_eval in (False, True):
        config = dataclasses.replace(OFF, virtual_boundaries=(1,), act_loss_in_eval=in_eval)
        real = [losses[0] for losses in pool.run(evaluated, 2, config)]
        assert pool.run(evaluated, 1, config, 2) == [real]
        assert (real != without) == in_eval


def outside(rank):
    """A message outside of a schedule, without gradients and with them."""
    hooks.install(BOTH)
    build(PLAIN)
    mine = torch.full((100,), 7.0, requires_grad=rank == 1)
    names = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
    ops = dict.fromkeys(names) | {names[1] if rank else names[2]: mine}
    where = {"group": torch.distributed.group.WORLD, "prev_pipeline_rank": 0, "next_pipeline_rank": 1}
    with torch.no_grad():
        mine.fill_(rank)
        for request in p2p_communication._batched_p2p_ops(**ops, **where):
            request.wait()
    if rank:
        with pytest.raises(UsageError, match=r"received outside of Megatron's schedules"):
            p2p_communication._batched_p2p_ops(**ops, **where)
    return mine.detach().numpy()


def test_a_message_outside_of_a_schedule():
    assert not run_ranks(outside, 2)[1].any()


def test_several_modules_are_refused():
    class MultiModulePipelineCommunicator:
        pass

    with pytest.raises(UsageError, match="^MultiModulePipelineCommunicator: cannot go with --p-act"):
        check_refusals(BOTH, of_communicator(MultiModulePipelineCommunicator()))
    check_refusals(BOTH, of_communicator(object()))
