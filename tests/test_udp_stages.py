"""Messages between stages as datagrams, on the real megatron-core: without loss, with drawn losses, and over a link."""

import dataclasses
import json
import os
import pickle
import re
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lossy import hooks
from megatron_lossy.config import LossyConfig
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from megatron_lossy.lab.delivery_log.verify import verify, verify_events
from megatron_lossy.mechanisms.boundaries import datagrams
from megatron_lossy.mechanisms.boundaries import links as stages
from megatron_lossy.mechanisms.boundaries.loss import BoundaryLoss
from megatron_lossy.transport.ends import close_ends
from tests import contract
from tests.boundaries import boundary_rows
from tests.in_lab import run_in_lab
from tests.ranks import RankFailed, run_ranks
from tests.rules import assert_same_weights
from tests.test_lab import needs_lab
from tests.test_pipeline_boundaries import BOTH, DEEP, PLAIN, WAYS, by_replica, check, place_of, record
from tests.tiny_gpt import TinyGPT, build

pytestmark = pytest.mark.shows(
    "messages between stages over UDP: by value, TP 2, interleaved, late stages",
    "a killed stage ends all others over UDP",
)

UDP = {"transport": "udp", "act_transport": "udp", "udp_key_file": "none", "loss_unit": "packet"}
#: The losses of the drawn world: datagrams are dropped when they come.
DRAWN = LossyConfig(**vars(BOTH) | UDP)
LOSSLESS = LossyConfig(**UDP, packet_bytes=200)
#: A wait for a peer that is gone would take longer than a test may.
PATIENT = LossyConfig(**UDP, packet_bytes=200, udp_peer_timeout=1000)


#: Their difference from the others is between torch and the schedule: tests/test_pipeline_boundaries.py has them, too.
LONG = ("one by one", "interleaved, groups of three", "interleaved, three chunks")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in WAYS])
def test_every_message_loses_what_is_drawn_for_it(name, pool):
    """As over torch, though what is lost comes as a datagram, and is put together or sent again over the network."""
    world, tiny, model = WAYS[name]
    ranks = pool.run(record, world, tiny, DRAWN, 2, model)
    zeros = check(ranks, tiny, DRAWN, itemsize=2 if "bf16" in name else 4)
    assert zeros["act"] and zeros["act-grad"]
    metrics = ranks[0]["metrics"]
    assert metrics["udp sent again"] > 0 and metrics["udp put together"] > 0


@pytest.mark.parametrize("flags", [{}, {"act_fec": ("off",)}])
def test_without_recovery_and_straight_through(flags, pool):
    settings = {"p_act": 0.3, "p_act_grad": 0.2, "packet_bytes": 200} if "act_fec" in flags else vars(BOTH)
    config = LossyConfig(**settings | flags | UDP)
    zeros = check(pool.run(record, 2, PLAIN, config), PLAIN, config)
    assert zeros["act"] and zeros["act-grad"]


def test_metrics_are_those_of_what_is_drawn(pool):
    """They count what came, and in the drawn world what was drawn."""
    over_torch, over_udp = (pool.run(record, 2, PLAIN, config, 8)[0]["metrics"] for config in (BOTH, DRAWN))
    names = [
        f"{what} {phase}"
        for what in ("loss rate", "zero share", "retransmitted share")
        for phase in ("act", "act-grad")
    ]
    assert all(over_torch[name] > 0 for name in names)
    assert [over_udp[name] for name in names] == [over_torch[name] for name in names]


def by_way_of_page_locked_memory(rank, *args):
    stages.staged = lambda tensor: True
    return record(rank, *args)


def test_by_way_of_a_copy_as_from_a_device_it_is_the_same():
    """The way of tensors on a device, but for the device."""
    for tiny in (PLAIN, DEEP):
        assert check(run_ranks(by_way_of_page_locked_memory, 2, tiny, DRAWN), tiny, DRAWN)["act"]


@pytest.mark.parametrize("in_eval", [False, True])
def test_evaluation_is_reliable_unless_asked_otherwise(in_eval, pool):
    """Then all of a message must arrive, whatever is lost at first."""
    config = dataclasses.replace(DRAWN, act_loss_in_eval=in_eval)
    ranks = pool.run(record, 2, PLAIN, config, 2, None, "no_grad")
    check(ranks, PLAIN, config)
    [recorded] = by_replica(ranks).values()
    same_all = [
        np.array_equal(recorded[step, "evaluation"]["out"][0, number], recorded[step, "evaluation"]["in"][1, number])
        for step in range(2)
        for number in range(PLAIN.accumulation)
    ]
    assert all(same_all) == (not in_eval)


@pytest.mark.parametrize(
    ("world", "tiny"),
    [
        (2, PLAIN),
        (2, DEEP),
        (4, TinyGPT(pipeline=2, accumulation=2, dtype="bf16", overlap_grad_reduce=True, overlap_param_gather=True)),
    ],
    ids=["plain", "interleaved", "two replicas, bf16, tied"],
)
@pytest.mark.slow
def test_stages_without_loss_are_megatrons(world, tiny, pool, unhooked):
    assert_same_weights(
        pool.run(contract.plain, world, tiny, LOSSLESS, 3), unhooked.run(contract.plain, world, tiny, None, 3)
    )


def with_a_late_stage(rank, tiny, config, late):
    """Losses of an evaluation and of a training; the stage of rank ``late`` comes to each a second after the others."""
    hooks.install(config)
    run = build(tiny)
    losses = []
    for does in (lambda: run.evaluate(0), lambda: run.step(0)["loss"]):
        time.sleep(rank == late)
        with torch.no_grad() if not losses else torch.enable_grad():
            losses.append(does())
    return losses, run.weights()


LARGE = TinyGPT(pipeline=2, hidden=128, sequence=64, micro_batch=4, accumulation=16, tied=False)


@pytest.fixture(scope="module")
def punctual():
    return run_ranks(with_a_late_stage, 2, LARGE, LossyConfig(), None)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.slow
def test_a_late_stage_loses_nothing(late, punctual):
    """Nor is anything kept beyond what may wait: messages are larger than that, and many."""
    config = LossyConfig(**UDP, act_fec=("off",), udp_memory=2**20)
    mine = run_ranks(with_a_late_stage, 2, LARGE, config, late)
    for (losses, weights), (expected, right) in zip(mine, punctual, strict=True):
        assert losses == expected
        for name, value in right.items():
            np.testing.assert_array_equal(weights[name], value, err_msg=name)


def links_of(rank, tiny, config):
    lossy = hooks.install(config)
    run = build(tiny)
    run.step(0)
    names = [link.name for link in lossy.part("boundaries").boundaries.links.all]
    counts = [link.counters() for link in lossy.part("boundaries").boundaries.links.all]
    lossy.uninstall()
    return names, counts


def test_within_a_node_nothing_crosses_as_a_datagram():
    """Only the second boundary of four stages on two nodes leaves a node."""
    tiny = TinyGPT(pipeline=4, layers=4, accumulation=2, tied=False)
    config = dataclasses.replace(LOSSLESS, lossy_links="inter-node:2")
    told = run_ranks(links_of, 4, tiny, config)
    name = "stages on ranks 1 and 2"
    assert [names for names, _ in told] == [[], [name], [name], []]
    packets = 2 * -(-16 * 2 * 32 * 4 // 200)
    for (_, [counts]), peer in ((told[1], 2), (told[2], 1)):
        assert counts[peer]["units"] == packets and counts[peer]["lost"] == 0


def test_two_interleaved_stages_have_two_links(pool):
    """One from the first stage on, and one from the last stage to the first."""
    names = ["stages on ranks 0 and 1", "stages on ranks 1 and 0"]
    assert [sorted(found) for found, _ in pool.run(links_of, 2, DEEP, LOSSLESS)] == [names, names]


def test_lengths_share_links(pool):
    """Messages of 21, 20 and 7 packets: one link for up to 32 packets, and one for up to 8."""
    tiny = dataclasses.replace(PLAIN, accumulation=6, lengths=(16, 15, 5))
    for rank, (names, counts) in enumerate(pool.run(links_of, 2, tiny, LOSSLESS)):
        assert names == ["stages on ranks 0 and 1"] * 2
        assert [count[1 - rank]["units"] for count in counts] == [2 * (21 + 20), 2 * 7]


def copies_lose_apart(rank, tiny, config):
    """As ``record``, where tensor-parallel ranks lose different packets of the same message."""
    datagrams.sequence_parallel_rank = lambda module: parallel_state.get_tensor_model_parallel_rank()
    return record(rank, tiny, config)


def test_tensor_parallel_peers_lose_what_one_of_them_lost():
    tiny = TinyGPT(tensor=2, pipeline=2, accumulation=2, tied=False)
    config = dataclasses.replace(DRAWN, act_fec=("4,2,0.3", "6,1,0.3", "0.5"))
    ranks = run_ranks(copies_lose_apart, 4, tiny, config)
    assert_peers_equal(ranks, ((0, 1), (2, 3)))
    assert sum(observed([ranks[0], ranks[2]], tiny, config, 2).values()) > 0


def assert_peers_equal(ranks, pairs):
    for one, other in pairs:
        for step in ranks[one]["recorded"]:
            for name in ("in", "grad_in"):
                for place, value in ranks[one]["recorded"][step][name].items():
                    if value is not None:
                        np.testing.assert_array_equal(value, ranks[other]["recorded"][step][name][place])


def test_with_sequence_parallelism_each_peer_has_losses_of_its_own():
    tiny = TinyGPT(tensor=2, pipeline=2, accumulation=2, tied=False, sequence_parallel=True)
    zeros = check(run_ranks(record, 4, tiny, DRAWN), tiny, DRAWN)
    assert zeros["act"] and zeros["act-grad"]


def observed(ranks, tiny, config, steps, itemsize=4):
    """Losses of a network: packets of zeros, no more than the bound of each message, and of the gradient sent back."""
    elements = config.packet_bytes // itemsize
    zeros = {"act": 0, "act-grad": 0}
    [recorded] = by_replica(ranks).values()
    for step in range(steps):
        notes = recorded[step]
        for stage in range(1, tiny.pipeline * (tiny.virtual or 1)):
            for number in range(tiny.accumulation):
                here, before = (stage, number), (stage - 1, number)
                for phase, left, came in (
                    ("act", notes["out"][before], notes["in"][here]),
                    ("act-grad", notes["grad_out"][here], notes["grad_in"][before]),
                ):
                    assert np.isfinite(came).all()
                    differs = (left != came).reshape(-1)
                    lost = np.add.reduceat(differs, np.arange(0, len(differs), elements)) > 0
                    mask = np.repeat(lost, elements)[: len(differs)].reshape(left.shape)
                    np.testing.assert_array_equal(came, np.where(mask, 0, left))
                    assert lost.sum() <= BoundaryLoss(config, phase).bound(place_of(stage, tiny), len(lost))
                    zeros[phase] += int(lost.sum())
                    if phase == "act":
                        assert not notes["grad_out"][here][mask].any()
    return zeros


#: Sites, the model, and the bound: one packet of 21, or one for each of two tensor-parallel ranks.
IN_THE_LAB = {
    "plain": ([1, 1], {"pipeline": 2, "accumulation": 3, "tied": False}, 0.05),
    "interleaved": ([1, 1], {"pipeline": 2, "virtual": 2, "layers": 4, "accumulation": 4, "tied": False}, 0.05),
    "tensor parallel": ([2, 2], {"tensor": 2, "pipeline": 2, "accumulation": 3, "tied": False}, 0.1),
}


@pytest.mark.shows("over a link that loses a seventh, zeros stay within bounds")
@needs_lab
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_THE_LAB)
def test_over_a_link_that_loses_a_seventh(name, tmp_path):
    """About a third of the messages lose a packet for good, and a fifth is sent again in part."""
    (sites, model, bound), steps = IN_THE_LAB[name], 8
    flags = {
        **UDP, "packet_bytes": 200, "act_fec": (f"4,2,{bound}", f"4,1,{bound}", "0.5"),
        "udp_interface": "lab0", "delivery_log": str(tmp_path / "log"),
    }  # fmt: skip
    arguments = (json.dumps(flags), json.dumps(model), str(steps), str(tmp_path))
    run_in_lab("tests.test_udp_stages", *arguments, loss=0.15, sites=sites, timeout=300)
    ranks = [pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(sum(sites))]
    tiny, config = TinyGPT(**model), LossyConfig(**flags | {"udp_interface": None})
    if name == "tensor parallel":
        assert_peers_equal(ranks, ((0, 1), (2, 3)))
        ranks = [ranks[0], ranks[2]]
    zeros = observed(ranks, tiny, config, steps)
    assert verify(DeliveryLogFolder(tmp_path / "log")).problems == verify_events(tmp_path / "log").problems == []
    rows = [row for row in boundary_rows(tmp_path / "log") if not row["stream"].endswith("-t1")]
    metrics = ranks[0]["metrics"]
    for phase, count in zeros.items():
        logged = sum(row["zeros"] for row in rows if row["kind"] == phase)
        # Of gradients some that were lost had been zeros when they left.
        assert logged == count if phase == "act" else logged >= count
        assert count > 0 and abs(metrics[f"loss rate {phase}"] - 0.15) < 0.08, metrics
    assert metrics["retransmitted share act"] + metrics["retransmitted share act-grad"] > 0, metrics
    assert metrics["udp put together"] > 0 and metrics["udp sent again"] > 0


def with_a_killed_stage(rank, tiny, config, killed):
    hooks.install(config)
    run = build(tiny)
    for step in range(100):
        if rank == killed and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(step)


@pytest.mark.slow
def test_a_killed_stage_ends_all_others():
    """Not by waiting: its neighbour learns of it from its host, and those beyond from the neighbour's."""
    tiny = TinyGPT(pipeline=3, layers=3, accumulation=4, tied=False)
    with pytest.raises(RankFailed) as failure:
        run_ranks(with_a_killed_stage, 3, tiny, PATIENT, 2)
    text = str(failure.value)
    assert re.search(r"PeerLost: rank 2 of stages on ranks 1 and 2 \(127.0.0.1:\d+\): its host refuses datagrams", text)
    assert re.search(r"PeerLost: rank 1 of stages on ranks 0 and 1 \(127.0.0.1:\d+\): ", text)


def ended(rank):
    lossy = hooks.install(PATIENT)
    run = build(PLAIN)
    run.step(0)
    lossy.uninstall()
    return lossy.part("boundaries").boundaries.links.all[0].counters()[1 - rank]["lost"]


def test_a_run_ends_in_order():
    assert run_ranks(ended, 2) == [0, 0]


def test_a_packet_is_a_datagram():
    assert LossyConfig(**UDP).packet_bytes == 1408 and LossyConfig().packet_bytes == 4096
    assert "activations and their gradients over UDP, parity" in LOSSLESS.describe()


def main():
    """``python -m tests.test_udp_stages FLAGS MODEL STEPS FOLDER``, with torch's environment; the first two are JSON."""
    flags, model, steps, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    flags = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items()}
    recorded = record(dist.get_rank(), TinyGPT(**model), LossyConfig(**flags), steps)
    (folder / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(recorded))
    close_ends()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
