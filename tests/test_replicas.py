"""Full replicas: errors in their gradients, check, repair and synchronisation, in Megatron (docs/corruption.md)."""

import dataclasses

import numpy as np
import pytest
import torch

from megatron_lossy import hooks
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.delivery_log.verify import verify_events
from megatron_lossy.lab.virtual.replicas import VirtualReplicas
from megatron_lossy.mechanisms.replicas.held import HeldReplicas
from tests.contract import made
from tests.ranks import RankFailed, run_ranks
from tests.rules import assert_same as same
from tests.test_delivery_log_events import rows_of
from tests.tiny_gpt import TinyGPT, build, missing

pytestmark = pytest.mark.shows(
    "full replicas without errors are Megatron's, bit for bit",
    "errors are repaired to the clean run's bits: TP, PP, experts",
    "two virtual workers with full replicas are two ranks, bit for bit",
    "errors of owners with the distributed optimizer",
)

STEPS = 6
TRAINED = ("loss", "norm", "weights")
NOISE = LossyConfig(grad_error="gaussian:1rms")
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 4000}


def full(**settings):
    return TinyGPT(**{"distributed_optimizer": False, "layers": 1, **settings})


def changed(**flags):
    return dataclasses.replace(NOISE, **flags)


def train(lossy, run, steps):
    """Results of a run on a rank: losses, norms, events, and weights, replica and mean."""
    told = [run.step(step) for step in range(steps)]
    metrics = lossy.metrics() if lossy is not None else {}
    result = {"loss": [one["loss"] for one in told], "norm": [one["grad_norm"] for one in told], "metrics": metrics}
    if lossy is not None:
        with lossy.owner_weights(run.model):
            result["mean"] = run.weights()
    return result | {"weights": run.weights()}


def on_ranks(rank, cases, steps=STEPS, workers=0):
    """Return the results of :func:`train` by the name of the case. ``cases``: name, model, flags; or no hooks.

    Of virtual ``workers`` losses and replicas are lists of their own.
    """
    results = {}
    for name, tiny, config in cases:
        lossy = VirtualReplicas(config, workers) if workers else config and hooks.install(config)
        run = build(tiny, lossy if workers else None)
        results[name] = train(lossy, run, steps)
        if workers:
            results[name]["weights"] = []
        for worker in range(workers):
            with lossy.worker(worker):
                results[name]["weights"].append(run.weights())
        if lossy is not None:
            lossy.uninstall()
    return results


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_replicas_without_errors_are_megatrons(size, pool):
    watched = LossyConfig(param_sync_interval=2, replica_check="repair", param_sync_state="all")
    models = {
        "fp32": full(),
        "bf16": full(dtype="bf16"),
        "overlap": full(**BUCKETS),
        "accumulated": full(dtype="bf16", accumulation=2, tied=False, **BUCKETS),
        "per token": full(per_token_loss=True),
    }
    overlapped = dataclasses.replace(watched, param_sync_overlap=True, param_sync_rule="divergence")
    cases = [
        (f"{name} {kind}", tiny, config)
        for name, tiny in models.items()
        for kind, config in (("plain", None), ("watched", watched), ("overlapped", overlapped))
    ]
    for told in pool.run(on_ranks, size, cases, 4):
        for name in models:
            for kind in ("watched", "overlapped"):
                mine, theirs = told[f"{name} {kind}"], told[f"{name} plain"]
                assert mine["metrics"]["param syncs"] == 0 and mine["metrics"]["gradient errors"] == 0
                same({k: mine[k] for k in TRAINED}, {k: theirs[k] for k in TRAINED})


HALVES = full(dtype="bf16", **BUCKETS)
CASES = {
    "noise": (full(), NOISE),
    "noise, bf16, buckets": (HALVES, changed(grad_error="gaussian:1e-3")),
    "of the reduction": (full(), changed(grad_error_at="reduce")),
    "now and then": (full(accumulation=2), changed(grad_error_rate=0.5, grad_error_ranks=(1,))),
    "bursts": (full(), changed(grad_error="gaussian:1rms,3,9.0")),
    "flips": (full(dtype="bf16"), LossyConfig(grad_error="bit-flip:3,0,29")),
    "mean": (full(), changed(param_sync_interval=2)),
    "mean, bf16, of all": (full(dtype="bf16"), changed(param_sync_interval=2, param_sync_state="all")),
    "first": (full(), changed(param_sync_interval=3, param_sync_state="all:first")),
    "overlapped": (full(), changed(param_sync_interval=2, param_sync_overlap=True)),
    "overlapped, bf16": (HALVES, changed(param_sync_interval=2, param_sync_overlap=True, param_sync_state="all")),
    "snr": (full(), changed(param_sync_interval=2, param_sync_rule="snr")),
    "snr, overlapped, bf16": (HALVES, changed(param_sync_interval=1, param_sync_rule="snr", param_sync_overlap=True)),
    "divergence": (full(), changed(param_sync_interval=1, param_sync_rule="divergence:0.02")),
    "repaired by mean": (full(), changed(replica_check="repair")),
    "only said": (full(), changed(replica_check="log")),
    "per token": (full(per_token_loss=True), NOISE),
    "drift": (full(), changed(drift_interval=1, param_sync_interval=4)),
}


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_virtual_workers_are_two_ranks_bit_for_bit(part, pool):
    cases = [(name, *case) for name, case in list(CASES.items())[part::2]]
    ranks = pool.run(on_ranks, 2, cases)
    [virtual] = pool.run(on_ranks, 1, cases, STEPS, 2)
    for name, _, config in cases:
        real, mine = [told[name] for told in ranks], virtual[name]
        same(mine["mean"], real[0]["mean"])
        same(real[1]["mean"], real[0]["mean"])
        for worker, told in enumerate(real):
            same(mine["weights"][worker], told["weights"])
            assert [losses[worker] for losses in mine["loss"]] == told["loss"], name
        assert mine["norm"] == real[0]["norm"]
        assert mine["metrics"] == pytest.approx(real[0]["metrics"], rel=1e-6), name
        apart = any((real[0]["weights"][k] != value).any() for k, value in real[1]["weights"].items())
        repaired = config.replica_check == "repair" or config.grad_error_at == "reduce"
        assert apart != repaired or config.param_sync_interval, name


def test_one_replica_has_no_errors(pool):
    """Nothing is reduced. Events of one rank are those of one virtual worker."""
    flips = LossyConfig(grad_error="bit-flip:50")
    flags = {"plain": LossyConfig(), "noise": NOISE, "reduce": changed(grad_error_at="reduce"), "flips": flips}
    cases = [(name, full(), config) for name, config in flags.items()]
    [real] = pool.run(on_ranks, 1, cases, 3)
    [virtual] = pool.run(on_ranks, 1, cases, 3, 1)
    for name in flags:
        same(virtual[name]["weights"][0], real[name]["weights"])
        same(real[name]["weights"], real["plain"]["weights"])


@pytest.mark.parametrize("at", ["broadcast", "reduce"])
def test_errors_of_ranks_are_logged_as_those_of_virtual_workers(tmp_path, at, pool):
    """Row by row, but for digests of other gradients; and the log itself shows that nothing is missing."""
    rows = {}
    for name, size, workers in (("real", 2, 0), ("virtual", 1, 2)):
        folder = tmp_path / name
        config = changed(grad_error_rate=0.7, grad_error_at=at, delivery_log=str(folder), param_sync_interval=10**6)
        pool.run(on_ranks, size, [("logged", full(), config)], 4, workers)
        verdict = verify_events(folder)
        assert verdict.problems == [] and verdict.rows > 0
        rows[name] = rows_of(folder)
    assert rows["real"] == rows["virtual"]


def hit_once(rank, size, tiny, hits, mode, steps):
    """A run in which buckets of some ranks are changed after their reduction. ``hits``: (step, rank, bucket, how)."""
    before = HeldReplicas.hit

    def hit(self, stream, replica, bucket, flat):
        before(self, stream, replica, bucket, flat)
        for when, who, which, how in hits:
            if (when, who, which) == (lossy.iteration, rank, bucket):
                if isinstance(how, int):
                    width, whole = {4: (32, torch.int32), 2: (16, torch.int16)}[flat.element_size()]
                    mask = 1 << how % width
                    flat[7:8].view(whole).bitwise_xor_(mask if how % width < width - 1 else -mask)
                else:
                    flat[5] = how

    with made(tiny, LossyConfig(replica_check=mode)) as (run, lossy):
        HeldReplicas.hit = hit
        result = train(lossy, run, steps)
        HeldReplicas.hit = before
    return result


HITS = [*([(1, 1, 0, bit)] for bit in (0, 22, 30, 31)), [(2, 0, 1, np.inf)], [(0, 2, 0, np.nan), (2, 1, 1, 12)]]


def cleanly(tiny, pool):
    return pool.run(on_ranks, 3, [("plain", tiny, None)], 4)


def assert_repaired(tiny, hits, clean, pool):
    """Ranks whose buckets are hit end as those of :func:`cleanly`, each hit found and repaired."""
    for told, expected in zip(pool.run(hit_once, 3, 3, tiny, hits, "repair", 4), clean, strict=True):
        same({k: told[k] for k in TRAINED}, {k: expected["plain"][k] for k in TRAINED})
        assert told["metrics"]["gradient repairs by majority"] == told["metrics"]["gradient mismatches"] == len(hits)


@pytest.fixture(scope="module")
def clean(pool):
    return cleanly(full(**BUCKETS), pool)


@pytest.mark.parametrize("hits", HITS)
def test_a_rare_error_leaves_the_clean_run_bit_for_bit(hits, clean, pool):
    assert_repaired(full(**BUCKETS), hits, clean, pool)


SCALED = {"constant": full(dtype="bf16", loss_scale=64.0, **BUCKETS), "dynamic": full(dtype="fp16", **BUCKETS)}


@pytest.mark.parametrize("kind", SCALED)
def test_repaired_replicas_skip_the_same_updates(kind, pool):
    """None here, though a gradient of one is infinite."""
    hits = [(1, 1, 0, float("inf")), (2, 2, 1, float("nan"))]
    assert_repaired(SCALED[kind], hits, cleanly(SCALED[kind], pool), pool)


def overflows(rank, tiny, config):
    """Return, by iteration, of which the second overflows, whether it was an update and averaged; the weights."""
    success, averaged = [], []
    with made(tiny, config) as (run, lossy):
        for step in range(4):
            success.append(run.step(step, overflow_on=0 if step == 1 else None)["success"])
            averaged.append(lossy.metrics()["param syncs"])
    return success, averaged, run.weights()


def test_an_update_that_all_skip_does_not_count(pool):
    config = changed(param_sync_interval=3, param_sync_state="params:always", replica_check="repair")
    told = pool.run(overflows, 3, SCALED["constant"], config)
    for success, averaged, weights in told:
        assert success == [True, False, True, True] and averaged == [0, 0, 0, 1]
        same(weights, told[0][2])


@pytest.mark.parametrize("kind", SCALED)
def test_replicas_that_would_skip_different_updates_are_refused(kind):
    """The model has no constant scale: the optimizer has it."""
    line = {"constant": "--loss-scale 64: ", "dynamic": "--fp16 on: "}[kind]
    with pytest.raises(RankFailed, match=line + "without the distributed optimizer, replicas that differ would skip"):
        run_ranks(on_ranks, 2, [("", SCALED[kind], NOISE)], 1)


def test_virtual_workers_share_no_loss_scale():
    config = changed(replica_check="repair")
    with pytest.raises(RankFailed, match="--loss-scale 64: replicas of virtual workers would change it"):
        run_ranks(on_ranks, 1, [("", SCALED["constant"], config)], 1, 2)


#: Micro-batches are added up in float32, gradients reduced in bfloat16: the optimizer reads copies of what was reduced.
APART = {"param_name_patterns_for_fp32_local_accumulation": ("all",)}


@pytest.mark.parametrize("overlap", [False, True])
def test_replicas_are_repaired_where_the_optimizer_reads(overlap, pool):
    tiny = full(dtype="bf16", grads_in_fp32=False, accumulation=2, ddp=APART, **(BUCKETS if overlap else {}))
    if why := missing(tiny):
        pytest.skip(why)
    hits = [(1, 1, bucket, bit) for bucket, bit in ((0, 30), (1, 22))[: 1 + overlap]]
    assert_repaired(tiny, hits, cleanly(tiny, pool), pool)


def test_gradients_apart_need_real_ranks():
    tiny = full(dtype="bf16", grads_in_fp32=False, ddp=APART)
    if why := missing(tiny):
        pytest.skip(why)
    with pytest.raises(RankFailed, match="--ddp-param-name-patterns-for-fp32-local-accumulation: virtual workers take"):
        run_ranks(on_ranks, 1, [("", tiny, NOISE)], 1, 2)


def test_abort_names_ranks_and_buckets():
    with pytest.raises(
        RankFailed, match=r"--replica-check abort: replicas have different gradients of dense.* bucket 0 \(ranks 1\)"
    ):
        run_ranks(hit_once, 3, 3, full(), [(1, 1, 0, 3)], "abort", 3)


PARALLEL = {
    "pipeline, tied": (2, 4, {"pipeline": 2, "layers": 2, "accumulation": 2}),
    "interleaved": (2, 4, {"pipeline": 2, "virtual": 2, "layers": 4, "accumulation": 2, "tied": False}),
    "tensor": (2, 4, {"tensor": 2}),
    "tensor, bf16": (2, 4, {"tensor": 2, "dtype": "bf16"}),
    "experts": (2, 4, {"experts": 4, "expert": 2}),
}


def looked_at(rank, tiny, config, looks):
    """Return the state after each number of steps."""
    found = {}
    with made(tiny, config) as (run, lossy):
        for step in range(max(looks)):
            run.step(step)
            if step + 1 in looks:
                with lossy.owner_weights(run.model):
                    mean = run.weights()
                found[step + 1] = {"weights": run.weights(), "mean": mean}
    return found


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.slow
def test_replicas_are_equal_after_a_synchronisation(name):
    """And apart before it; copies of tied and replicated parameters stay copies."""
    replicas, ranks, settings = PARALLEL[name]
    tiny = full(**settings)
    if why := missing(tiny):
        pytest.skip(why)
    config = changed(param_sync_interval=3, param_sync_state="all")
    found = run_ranks(looked_at, ranks, tiny, config, (3, 4))
    together, apart = ([of_rank[steps] for of_rank in found] for steps in (3, 4))
    groups = _replicas_of(name, replicas, ranks)
    for group in groups:
        for rank in group[1:]:
            same(together[rank]["weights"], together[group[0]]["weights"])
            mine, theirs = apart[rank]["weights"], apart[group[0]]["weights"]
            assert any((mine[k] != theirs[k]).any() for k in theirs)
            same(apart[rank]["mean"], apart[group[0]]["mean"])
    if name == "pipeline, tied":
        for first, last in ((0, 2), (1, 3)):
            tied = apart[first]["weights"]["embedding.word_embeddings.weight"]
            np.testing.assert_array_equal(tied, apart[last]["weights"]["output_layer.weight"])
    if name.startswith("tensor"):
        for first, second in ((0, 1), (2, 3)):
            for parameter, value in apart[first]["weights"].items():
                if "layernorm" in parameter:
                    np.testing.assert_array_equal(value, apart[second]["weights"][parameter])


def _replicas_of(name, replicas, ranks):
    """Lists of global ranks that have the same parameters."""
    apart = ranks // replicas
    if name.startswith(("tensor", "experts")):
        return [range(first, ranks, replicas) for first in range(apart)]
    return [range(first * replicas, (first + 1) * replicas) for first in range(apart)]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("lossy", [{}, {"p_grad": 0.3, "p_param": 0.3}], ids=["no loss", "loss"])
def test_errors_of_owners_with_the_distributed_optimizer(lossy, per_token, pool):
    """A noisy step, but no divergence; virtual workers do the same, with errors in units of what ranks have.

    They add up what ranks divide by their number before the sum, unless gradients are sums over tokens.
    """
    tiny = TinyGPT(**BUCKETS, overlap_param_gather=True, per_token_loss=per_token)
    config = changed(grad_error_at="reduce", **lossy)
    ranks = pool.run(owned, 2, tiny, config, 4)
    [(virtual, rms)] = pool.run(owned, 1, tiny, config, 4, 2)
    for worker, (told, own_rms) in enumerate(ranks):
        same(virtual[worker], told)
        assert own_rms == pytest.approx(rms, rel=1e-5)
    if not lossy:
        same(ranks[0][0], ranks[1][0])
    [(plain, _), _] = pool.run(owned, 2, tiny, LossyConfig(**lossy), 4)
    assert any((plain[name] != value).any() for name, value in ranks[0][0].items())


def owned(rank, tiny, config, steps, workers=None):
    """The replica of a rank, or those of all virtual workers; and the size of errors."""
    with made(tiny, config, workers) as (run, lossy):
        for step in range(steps):
            run.step(step)
            if not workers:
                run.gather()
        metrics = lossy.metrics()
        assert config.inert or config.lossless or metrics["loss rate grad"] > 0
    return run.all_replica_buffers() if workers else run.replica_buffers(), metrics.get("error rms")
