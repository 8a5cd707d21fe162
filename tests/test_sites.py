"""Sites on real ranks: what crosses between them is what the NumPy reference says, and a site holds one replica."""

import collections
import dataclasses
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Exchange
from megatron_lossy.channel.draws import coding_keys
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport.ends import end_for
from megatron_lossy.transport.settings import settings_of
from megatron_lossy.transport.sites import check_blocks
from tests import contract, fsdp
from tests.between_sites import crossings
from tests.ranks import run_ranks
from tests.reference import hashed_uniforms
from tests.rules import assert_same
from tests.test_compression import decoded
from tests.test_delivery_log import MODEL, STEPS, table, verdict
from tests.test_hooks_owner_weights import OVERLAPS, resume, save_and_go_on, undisturbed
from tests.test_monitor import drift_real, drift_virtual, flat, only_drift
from tests.test_virtual import BUCKETS, assert_virtual_is_real, real_runs, trained, virtual_runs
from tests.tiny_gpt import TinyGPT, build
from tests.trainer import TINY, train_runs

pytestmark = pytest.mark.shows("losses between sites by value; one replica in each site")

BOTH = LossyConfig(p_grad=0.4, p_param=0.4, loss_unit="packet", packet_bytes=1000, sites=2)
STAGES_INSIDE = "tp-cp-ep-pp-dp"


def between_sites(recorded, config, averaged=False):
    """``recorded`` of ``contract.record`` as the exchanges between sites: a rank stands for its site, with its shards.

    All ranks of a site hold the same replica after each iteration.
    """
    sites = config.sites
    result = [[None if one is None else dict(one, buckets=[]) for one in iterations] for iterations in recorded]
    for step in range(len(recorded[0])):
        for rank, iterations in enumerate(recorded):
            if iterations[step] is None:
                continue
            for number, place in enumerate(iterations[step]["buckets"]):
                members = place["group"]
                size = len(members) // sites
                site, column = divmod(members.index(rank), size)

                def own(values, size=size, column=column):
                    return values.reshape(sites, size, -1)[:, column].reshape(-1)

                of_site = [recorded[member][step]["buckets"][number] for member in members[site * size :][:size]]
                for other in of_site:
                    np.testing.assert_array_equal(other["after"], place["after"])
                sent = own(sum(other["sent"] for other in of_site))
                if config.grad_wire != "raw":
                    shards = [
                        one["shard"] for one in sorted(iterations[step]["buckets"], key=lambda one: one["number"])
                    ]
                    sent = gradients_in_codes(sent, place, shards, config, step, site)
                result[rank][step]["buckets"].append(
                    {
                        **place,
                        "group": members[column::size],
                        "full": members[column::size],
                        "sent": sent / np.float32(size) if averaged else sent,
                        "before": own(place["before"]),
                        "after": own(place["after"]),
                    }
                )
    return result


def gradients_in_codes(sent, place, shards, config, step, site):
    """Return the values that others get of ``sent`` float32[M * shard] of ``site``. ``shards``: elements of all buckets."""
    exchange, rows = Exchange("grad", place["stream"], step), sent.reshape(config.sites, -1).copy()
    keys = coding_keys(config.loss_seed, exchange, site, range(config.sites)).view(np.uint32)
    first = sum(-(-shard // 256) * 256 for shard in shards[: place["number"]])
    for owner in set(range(config.sites)) - {site}:
        u = hashed_uniforms([int(word) for word in keys[owner]], first, len(rows[owner]))
        elements = place["units"]["grad"][1]
        rows[owner] = decoded(rows[owner], config.wire_bits["grad"], elements, u, config.wire_block)
    return rows.reshape(-1)


def crossing_of(config):
    """For ``contract.check``: what crosses of owners' weights, with a lead against independent losses, or in codes."""

    def crossing(place, before, owners):
        if config.param_send == "compensated":
            return owners + np.float32(config.p_param / (1 - config.p_param)) * (owners - before)
        if config.param_wire == "raw":
            return owners
        bits, elements = config.wire_bits["param"], place["units"]["param"][1]
        return np.array([decoded(one, bits, elements, None, config.wire_block) for one in owners])

    return crossing


def holds(pool, tiny, world, config, steps=4, overflows=None, without=(), gapless=False, **how):
    recorded = pool.run(contract.record, world, tiny, config, steps, overflows, without, gapless)
    averaged = tiny.average_in_collective
    exchanges = between_sites(recorded, config, averaged)
    contract.check(exchanges, config, averaged=averaged, crossing=crossing_of(config), loses=True, **how)


@pytest.mark.on_cuda
@pytest.mark.shows("losses between sites by value")
@pytest.mark.parametrize("rule", ["renormalize", "renormalize-remote", "previous", "zero", "error-feedback"])
@pytest.mark.parametrize("unit", ["shard", "bucket", "packet"])
def test_every_rule_and_unit(rule, unit, pool):
    """Two sites of two ranks: to the last bit."""
    if rule == "error-feedback" and unit != "packet":
        pytest.skip("its packets have priorities")
    config = dataclasses.replace(BOTH, grad_recovery=rule, loss_unit=unit)
    if rule == "error-feedback":
        config = dataclasses.replace(config, grad_priority="packet-mean:0.1", packet_bytes=400)
    holds(pool, TinyGPT(**BUCKETS), 4, config)


CODES = {"packet_bytes": 264, "wire_block": 64, "transport": "pieces"}
#: The sums of more than two ranks are in an order of the backend.
ROUNDED = {"exact": False}
OVERFLOW = {"steps": 6, "overflows": {2: 1}, "without": (3,), "rtol": 1e-3, "atol": 1e-4, "exact": False}
#: By name: ranks, model, flags, and how it is checked.
SETTINGS = {
    "no overlap": (4, TinyGPT(), {}, {}),
    "three sites": (6, TinyGPT(**BUCKETS), {"sites": 3}, {}),
    "a rank a site": (3, TinyGPT(**BUCKETS), {"sites": 3}, {}),
    "four ranks a site": (8, TinyGPT(**BUCKETS), {}, ROUNDED),
    "bf16, accumulation": (4, TinyGPT(dtype="bf16", accumulation=2, **BUCKETS), {}, {}),
    "fp16, overflow, a skipped iteration": (
        4, TinyGPT(dtype="fp16", **BUCKETS), {"grad_recovery": "previous"}, OVERFLOW,
    ),
    "average in collective": (4, TinyGPT(average_in_collective=True, **BUCKETS), {}, {}),
    "fp32 accumulation": (4, TinyGPT(fp32_accumulation=True, **BUCKETS), {}, {}),
    "tensor parallel": (8, TinyGPT(tensor=2, **BUCKETS), {}, {}),
    "pipeline, tied": (8, TinyGPT(pipeline=2, accumulation=2, order=STAGES_INSIDE, **BUCKETS), {}, {}),
    "experts": (8, TinyGPT(expert=2, experts=4, **BUCKETS), {}, ROUNDED),
    "tiny, padded buckets": (4, TinyGPT(layers=1, hidden=20, heads=2, vocab=30, **BUCKETS | {"bucket_size": 50}), {}, {}),
    "lead": (4, TinyGPT(**BUCKETS), {"param_send": "compensated"}, {}),
    "lead, three sites": (6, TinyGPT(), {"sites": 3, "param_send": "compensated"}, {}),
    "int8": (4, TinyGPT(**BUCKETS), {"grad_wire": "int8", "param_wire": "int8", **CODES}, ROUNDED),
    "int4, three sites": (6, TinyGPT(), {"sites": 3, "grad_wire": "int4", "param_wire": "int8", **CODES}, ROUNDED),
}  # fmt: skip
FEW = ("no overlap", "three sites", "fp32 accumulation", "lead", "int8")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in SETTINGS]
)
def test_every_setting_of_megatron(name, pool):
    world, tiny, flags, how = SETTINGS[name]
    holds(pool, tiny, world, dataclasses.replace(BOTH, **flags), **how)


def test_a_rank_a_site_is_no_site_bit_for_bit(pool):
    flat = dataclasses.replace(BOTH, sites=None)
    mine, theirs = (pool.run(contract.plain, 2, TinyGPT(**BUCKETS), config, 4) for config in (BOTH, flat))
    assert_same(mine, theirs)


def test_pieces(pool):
    holds(pool, TinyGPT(**BUCKETS), 4, dataclasses.replace(BOTH, transport="pieces"))


@pytest.mark.parametrize("network", [{"transport": "udp"}, {"transport": "stream", "udp_deadline": "off"}])
def test_what_loses_nothing_gives_the_weights_of_pieces_and_of_the_flat_exchange(network, pool):
    """The flat one but for rounding."""
    tiny, sites = TinyGPT(optimizer="sgd", **BUCKETS), {"sites": 2, "loss_unit": "packet"}
    configs = (LossyConfig(**network, **sites), LossyConfig(transport="pieces", **sites), None)
    mine, pieces, theirs = (pool.run(contract.plain, 4, tiny, one, 3) for one in configs)
    assert_same(mine, pieces)
    for (weights, _), (expected, _) in zip(mine, theirs):
        for name, value in expected.items():
            np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("ranks", "sites", "world"), [((0, 1), 2, 4), ((0, 1, 2), 2, 4), ((0, 2, 1, 3), 2, 4), ((0, 1, 2), 2, 3)]
)
def test_only_groups_that_sites_cut_unevenly_are_refused(ranks, sites, world):
    with pytest.raises(UsageError, match="--sites 2: each data-parallel group must have equally many ranks"):
        check_blocks(ranks, sites, world)
    for even in ((0, 1, 2, 3), (0, 2), (1, 3)):
        check_blocks(even, 2, 4)


# --- bytes ---------------------------------------------------------------------------------------------------------


def datagram_bytes(rank, tiny, config, steps):
    """The bytes of all datagrams of this rank in ``steps`` iterations, and those of all gradients and weights in one."""
    with contract.installed(config):
        run = build(tiny)
        run.step(0)
        dist.barrier()
        before = end_for(config).counters()["bytes_sent"]
        for step in range(1, 1 + steps):
            run.step(step)
        dist.barrier()
        whole = 2 * sum(bucket.nbytes for bucket in run.replica_buffers().values())
        return end_for(config).counters()["bytes_sent"] - before, whole


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("wire", "bits"), [("raw", 32), pytest.param("int8", 8, marks=pytest.mark.slow)])
def test_bytes_of_datagrams_are_those_of_the_formula(wire, bits, ranks, pool):
    """Headers, parts of packets and acknowledgements included: 7 % at most over half of gradients and weights."""
    config = LossyConfig(transport="udp", sites=2, grad_wire=wire, param_wire=wire)
    sent, whole = zip(*pool.run(datagram_bytes, 2 * ranks, TinyGPT(hidden=128, vocab=256), config, 4))
    for site in (sent[:ranks], sent[ranks:]):
        assert sum(site) / 4 == pytest.approx(whole[0] / 2 * bits / 32, rel=0.07)


# --- scalars -------------------------------------------------------------------------------------------------------


def sums(rank, tiny, config, steps):
    """Count the collectives of small sums in an iteration, by name and ranks of the group."""
    with contract.installed(config), crossings() as found:
        run = build(tiny)
        for step in range(steps):
            found.clear()
            run.step(step)
            loss, largest, mean = torch.tensor([float(rank)]), torch.tensor([rank]), torch.tensor([float(rank)] * 3)
            handle = dist.all_reduce(loss, async_op=True)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            handle.wait()
            assert (loss.item(), largest.item(), mean.tolist()) == (6.0, 3, [1.5] * 3)
    return small(found)


def small(found):
    """Return, from ``found`` in :func:`crossings`, the sums of few numbers, by a ring or by sending to all."""
    result, kinds = collections.Counter(), {"allreduce": "ring", "alltoall_base": "all", "all_to_all_single": "all"}
    for (name, ranks, elements), count in found.items():
        if elements <= 64 and name in kinds:
            result[kinds[name], ranks] += count
    return result


def test_scalars_cross_between_two_ranks_only(pool):
    """The norm, a sum that is waited for later, a maximum and a mean: each is half a round trip between two ranks."""
    tiny = TinyGPT()
    assert pool.run(sums, 4, tiny, BOTH, 2) == [{("all", 2): 4}] * 4
    assert pool.run(sums, 4, tiny, dataclasses.replace(BOTH, sites=None), 2) == [{("ring", 4): 4}] * 4


def sums_of_fsdp2(rank, config):
    """The small sums of an iteration that clips, their results, and the functional sums over all ranks."""
    from torch.distributed import _functional_collectives as functional

    whole, original = [], functional.all_reduce
    noted = lambda *args, **kwargs: whole.append(1) or original(*args, **kwargs)
    unpatched = dist.all_reduce
    with mock.patch.object(functional, "all_reduce", noted):
        run = fsdp.Training(fsdp.Tiny(clips=True), config)
        run.step(0)
        with crossings() as found:
            whole.clear()
            loss = run.step(1)
            one = torch.tensor([float(rank)])
            dist.all_reduce(one)
        if run.lossy is not None:
            run.lossy.close()
    assert one.item() == 6 and dist.all_reduce is unpatched
    return small(found), len(whole), loss


def test_scalars_of_fsdp2_cross_between_two_ranks_only(pool):
    """The norm of ``clip_grad_norm_``, and a sum of the program: half a round trip each; nothing stays patched."""
    config = LossyConfig(sites=2, transport="pieces")
    for (in_sites, whole, loss), (_, _, expected) in zip(
        pool.run(sums_of_fsdp2, 4, config), pool.run(sums_of_fsdp2, 4, None)
    ):
        assert in_sites == {("all", 2): 2} and whole == 0
        assert loss == pytest.approx(expected, rel=1e-5)


# --- virtual workers -----------------------------------------------------------------------------------------------


def cases():
    """(name, TinyGPT, LossyConfig) of four workers in two sites, as of tests/test_virtual.py."""
    packets = {"loss_unit": "packet", "packet_bytes": 512}
    lossy = {"p_grad": 0.4, "p_param": 0.4, "sites": 2}
    for unit in ({}, {"loss_unit": "bucket"}, packets):
        for rule in ("renormalize", "renormalize-remote", "previous", "zero"):
            yield f"{unit} {rule}", {"layers": 1, **BUCKETS}, LossyConfig(**lossy, **unit, grad_recovery=rule)
    both = LossyConfig(**lossy, **packets)
    codes = {"grad_wire": "int8", "param_wire": "int8", "transport": "pieces"}
    for name, model, more in (
        ("lead", {}, {"param_send": "compensated"}),
        ("lead, bf16", {"dtype": "bf16"}, {"param_send": "compensated"}),
        ("codes", BUCKETS, codes),
        ("codes, lead", {}, codes | {"param_send": "compensated"}),
        ("feedback", {}, {"grad_recovery": "error-feedback", "grad_priority": "packet-mean:0.1"}),
        ("pieces", BUCKETS, {"transport": "pieces"}),
        ("bf16, accumulation", {"dtype": "bf16", "accumulation": 2}, {}),
        ("fp16, overflowing at first", {"dtype": "fp16", "initial_loss_scale": 2.0**18}, {}),
        ("noise", {}, {"grad_error": "gaussian:0.01", "grad_error_at": "reduce"}),
        ("gradients only", {}, {"p_param": 0.0}),
    ):
        yield name, {"layers": 1, **model}, dataclasses.replace(both, **more)


@pytest.mark.slow
def test_four_workers_in_two_sites_are_four_ranks_bit_for_bit():
    """Losses, norms, replicas and owners' weights after every step; and the two replicas differ."""
    chosen = list(cases())
    real = run_ranks(real_runs, 4, chosen)
    [virtual] = run_ranks(virtual_runs, 1, chosen, 4)
    for name, _, config in chosen:
        # Between turns the buffers of virtual workers hold what owners send, which may not be their weights.
        plain = config.param_send == "plain" and config.param_wire == "raw"
        assert_virtual_is_real(virtual[name], [one[name] for one in real], plain)
        last = virtual[name][-1][2]
        same = all(np.array_equal(last[0][key], last[2][key]) for key in last[0])
        assert same == (config.p_param == 0), name


# --- what is saved and recorded ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("send", ["plain", "compensated"])
def test_replicas_are_saved_and_restored(send, pool, tmp_path):
    config = dataclasses.replace(BOTH, save_replicas=True, grad_recovery="previous", param_send=send)
    saved = pool.run(save_and_go_on, 4, OVERLAPS["both"], config, str(tmp_path))
    again = pool.run(resume, 4, OVERLAPS["both"], config, str(tmp_path), [weights for weights, _ in saved])
    assert again == [report for _, report in saved]


@pytest.mark.slow
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_owner_weights_do_not_disturb_training(overlap, pool):
    undisturbed(pool, 4, OVERLAPS[overlap], BOTH)


def log_and_replay(rank, folder, workers=None):
    units = {"sites": 2, "loss_unit": "packet", "packet_bytes": 512}
    log = LossyConfig(p_grad=0.4, p_param=0.4, delivery_log=folder, **units)
    recorded = trained(rank, TinyGPT(**MODEL), log, STEPS, workers)
    if dist.is_initialized():
        dist.barrier()  # a replay reads the files of all ranks
    replay = LossyConfig(loss_model=("trace",), trace=folder, loss_seed=7, **units)
    return recorded, trained(rank, TinyGPT(**MODEL), replay, STEPS, workers)


@pytest.mark.slow
def test_a_replay_is_the_recorded_run_and_logs_of_real_and_virtual_runs_are_equal(tmp_path):
    real = run_ranks(log_and_replay, 4, str(tmp_path / "real"))
    [virtual] = run_ranks(log_and_replay, 1, str(tmp_path / "virtual"), 4)
    for results in [*real, virtual]:
        assert_same(*results)
    logs = [table(tmp_path / kind) for kind in ("real", "virtual")]
    assert verdict(tmp_path / "real").problems == []
    assert logs[0].equals(logs[1]) and set(logs[0]["source"].to_pylist()) == {0, 1}


@pytest.mark.slow
def test_drift_is_that_of_the_replicas_of_sites():
    chosen = {"packets": ({"overlap_grad_reduce": True, "bucket_size": 3000}, BOTH)}
    real = run_ranks(drift_real, 4, chosen)
    [virtual] = run_ranks(drift_virtual, 1, chosen, 4)
    for step in (1, 3):
        metrics = only_drift(real[0]["packets"][0][step][0])
        first, second = (flat(real[rank]["packets"][0][step][1]) for rank in (0, 2))
        assert metrics["drift pairs"] == pytest.approx(np.mean((first - second) ** 2), rel=1e-9)
        assert metrics["drift owner"] == pytest.approx(metrics["drift pairs"], rel=1e-9)  # one of two is the owner
        assert only_drift(virtual["packets"][step]) == pytest.approx(metrics, rel=1e-9)


# --- FSDP2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["renormalize", "previous"])
def test_fsdp2_by_value(rule, pool):
    config = dataclasses.replace(BOTH, packet_bytes=64, grad_recovery=rule)
    recorded = pool.run(fsdp.record, 4, fsdp.Tiny(), config, 4)
    contract.check(between_sites(recorded, config, averaged=True), config, averaged=True, loses=True)


# --- our trainer ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stages_inside_of_sites_change_no_value(data):
    """The ranks of a pipeline are others, and data-parallel ranks exchange the same."""
    stages = TINY | data | {"pipeline_model_parallel_size": 2, "train_iters": 3}
    mapped = stages | {"use_tp_pp_dp_mapping": True}
    loss = {"p_grad": 0.3, "p_param": 0.3}
    runs = [(stages, loss), (mapped, loss), (mapped, loss | {"sites": 2})]
    for summaries, _ in run_ranks(train_runs, 4, *runs):
        assert summaries[1] == summaries[0] == summaries[2]


def rate(rank, config):
    return settings_of(config).rate


def test_the_ranks_of_a_site_share_its_rate(pool):
    config = LossyConfig(transport="udp", loss_unit="packet", udp_rate="100mbit", sites=2)
    flat = dataclasses.replace(config, sites=None)
    assert pool.run(rate, 4, config) == [1e8 / 8 / 2] * 4 and pool.run(rate, 4, flat) == [1e8 / 8] * 4
