"""Refusals of the hooks before they change anything: versions of Megatron, and settings that cannot be right."""

import contextlib
import sys
import types

import numpy as np
import pytest
import torch

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.facts import Facts
from megatron_lossy.config.refusal import check_refusals
from megatron_lossy.hooks import Lossy, check_version, megatron_training
from megatron_lossy.hooks.checks import check_run
from megatron_lossy.hooks.facts import _expert_data_parallel_ranks, of_arguments, of_model
from megatron_lossy.run.mechanism import Events

pytestmark = pytest.mark.shows("versions of Megatron and settings that the hooks refuse", device=False)


def check_arguments(arguments, config):
    check_refusals(config, of_arguments(arguments))


def check_ddp(ddp, config):
    check_refusals(config, of_model(ddp))


@pytest.mark.parametrize("version", ["0.10.0", "0.21.0", "1.0", "unknown"])
def test_unsupported_versions_are_named(version):
    with pytest.raises(UsageError, match=version):
        check_version(version)
    check_version("0.16.1")


class Arguments:
    use_distributed_optimizer = True
    optimizer = "adam"
    rank = 1


PARAM = {"p_param": 0.1}
BOUNDARY = {"p_act": 0.1, "virtual_boundaries": (2,)}


@pytest.mark.parametrize(
    ("name", "value", "flags", "line"),
    [
        ("use_distributed_optimizer", False, PARAM, "--p-param 0.1: needs .* --use-distributed-optimizer"),
        ("use_distributed_optimizer", False, {"p_grad": 0.1}, "--p-grad 0.1: needs .* --use-distributed-optimizer"),
        ("use_megatron_fsdp", True, PARAM, "--use-megatron-fsdp"),
        ("optimizer_cuda_graph", True, PARAM, "--optimizer-cuda-graph"),
        ("reuse_grad_buf_for_mxfp8_param_ag", True, PARAM, "--reuse-grad-buf-for-mxfp8-param-ag"),
        ("cuda_graph_scope", ["full_iteration"], PARAM, "--cuda-graph-scope"),
        ("fp8_param_gather", True, PARAM, "--fp8-param-gather"),
        ("check_weight_hash_across_dp_replicas_interval", 10, PARAM, "--check-weight-hash-across-dp-replicas-interval"),
        ("non_persistent_ckpt_type", "local", PARAM | {"save_replicas": True}, "--non-persistent-ckpt-type local:"),
        ("non_persistent_ckpt_type", "global", PARAM | {"save_replicas": True}, "--non-persistent-ckpt-type global:"),
        ("cuda_graph_impl", "local", BOUNDARY, "CUDA graphs of layers: would lose the same or nothing"),
        ("enable_cuda_graph", True, BOUNDARY, "CUDA graphs of layers"),
        ("overlap_moe_expert_parallel_comm", True, BOUNDARY, "--overlap-moe-expert-parallel-comm on: runs layers in"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(name, value, flags, line):
    arguments = Arguments()
    vars(arguments).update(num_layers=4, pipeline_model_parallel_size=1, cuda_graph_impl="none")
    check_arguments(arguments, LossyConfig(**flags))
    setattr(arguments, name, value)
    check_arguments(arguments, LossyConfig())  # without loss nobody minds
    with pytest.raises(UsageError, match="^" + line):
        check_arguments(arguments, LossyConfig(**flags))


@pytest.mark.parametrize(
    ("optimizer", "sharded", "layer_wise"),
    [
        ("muon", False, None),
        ("dist_muon", False, None),
        ("muon", False, True),
        ("muon", False, False),
        ("soap", False, True),
        ("adam", True, False),
        ("sgd", True, False),
        ("fusedadamw", True, None),  # Habana's
    ],
)
def test_a_layer_wise_optimizer_is_named_and_not_what_megatron_turned_off_for_it(optimizer, sharded, layer_wise):
    """As Megatron's own validation leaves the arguments: before 0.18, and after."""
    arguments = Arguments()
    arguments.optimizer, arguments.use_distributed_optimizer = optimizer, sharded
    if layer_wise is not None:
        arguments.use_layer_wise_distributed_optimizer = layer_wise
    line = f"^--optimizer {optimizer}: layer-wise .* choose adam or sgd"
    with contextlib.nullcontext() if sharded else pytest.raises(UsageError, match=line):
        check_arguments(arguments, LossyConfig(p_grad=0.1))


def test_a_layer_wise_layout_is_refused_in_loops_without_arguments():
    """Mark a model as Megatron's ``tag_params_for_buffer_routing`` does before it is wrapped."""
    module = torch.nn.Linear(2, 2)
    settings = types.SimpleNamespace(use_distributed_optimizer=True)
    ddp = types.SimpleNamespace(
        ddp_config=settings, config=settings, module=module, buffers=[], expert_parallel_buffers=[]
    )
    check_ddp(ddp, LossyConfig(p_grad=0.1))
    module.bias.is_managed_by_layer_wise_optimizer = False
    check_ddp(ddp, LossyConfig(p_grad=0.1))
    module.weight.is_managed_by_layer_wise_optimizer = True
    with pytest.raises(UsageError, match="LayerWiseDistributedOptimizer: layer-wise optimizers gather differently"):
        check_ddp(ddp, LossyConfig(p_grad=0.1))


@pytest.mark.parametrize(
    ("settings", "flags", "needed"),
    [
        ({}, {"p_grad": 0.1}, 4),
        ({"bf16": True}, {"p_grad": 0.1}, 4),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, {"p_grad": 0.1}, 2),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, {"islands": 2, "sync_method": "parameters"}, 4),
    ],
)
def test_packets_hold_an_element_of_all_that_crosses(settings, flags, needed):
    arguments = types.SimpleNamespace(use_distributed_optimizer=True, **settings)
    check_arguments(arguments, LossyConfig(**flags, loss_unit="packet", packet_bytes=needed))
    with pytest.raises(
        UsageError, match=f"^--packet-bytes {needed - 1}: must hold at least one element of {needed} by"
    ):
        check_arguments(arguments, LossyConfig(**flags, loss_unit="packet", packet_bytes=needed - 1))


def test_a_trace_is_checked_against_the_sizes_that_megatron_settled_on(tmp_path, monkeypatch):
    """They may come from a checkpoint. Nothing is claimed for a run that is refused."""
    arrived = np.ones((5, 2, 2, 1), dtype=bool)
    np.savez(tmp_path / "trace.npz", grad=arrived, param=arrived)
    config = LossyConfig(loss_model=("trace",), trace=str(tmp_path / "trace.npz"))
    monkeypatch.setattr(megatron_training, "usage_errors", contextlib.nullcontext)
    claimed = []
    monkeypatch.setattr(megatron_training, "_claim_delivery_log", lambda *_: claimed.append(1))

    def validate(**sizes):
        arguments = Arguments()
        vars(arguments).update({"context_parallel_size": 1, "train_iters": 5} | sizes)
        lossy = types.SimpleNamespace(config=config, events=Events(), job=0, jobs=1, steps=None)
        return megatron_training.validate_args(lossy, lambda args: args, arguments)

    assert validate(data_parallel_size=2).data_parallel_size == 2 and len(claimed) == 1
    with pytest.raises(UsageError, match="is of 2 ranks, but the group has 4"):
        validate(data_parallel_size=2, context_parallel_size=2)
    with pytest.raises(UsageError, match="has 5 steps in phase grad, the run needs 6"):
        validate(data_parallel_size=2, train_iters=6)
    assert len(claimed) == 1


def test_other_processes_can_copy_the_owners_weights_while_a_checkpoint_is_scheduled(monkeypatch):
    """Megatron's persistent workers read the device's memory, unordered by streams, before ``save_checkpoint`` returns."""
    happened = []

    class Lossy:
        parts = ()

        @contextlib.contextmanager
        def owner_weights(self, model):
            happened.append("gathered")
            yield
            happened.append("put back")

    def save(iteration, model, **kwargs):
        happened.append("saved")

    training = types.ModuleType("megatron.training")
    training.get_args = None
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("synchronized"))
    megatron_training.save_checkpoint(Lossy(), save, 5, [], non_persistent_ckpt=True)
    assert happened == ["gathered", "synchronized", "saved", "put back"]


def test_settings_of_a_yaml_file_are_checked_too(monkeypatch):
    """Megatron then calls another function, on arguments that keep sizes in a section."""
    monkeypatch.setattr(megatron_training, "usage_errors", contextlib.nullcontext)
    monkeypatch.setattr(megatron_training, "_claim_delivery_log", lambda *_: None)
    lossy = types.SimpleNamespace(config=LossyConfig(p_grad=0.1))
    targets = {patch.target: patch for patch in megatron_training.patches(Lossy(lossy.config))}
    check = targets["megatron.training.yaml_arguments:validate_yaml"].around
    assert "megatron.training.initialize:validate_yaml" in targets

    def sizes(data, context):
        sections = types.SimpleNamespace(context_parallel_size=context)
        return types.SimpleNamespace(
            use_distributed_optimizer=True, data_parallel_size=data, model_parallel=sections, train_iters=5, rank=1
        )

    check(lambda args: args, sizes(1, 2))
    with pytest.raises(UsageError, match="data-parallel size 1"):
        check(lambda args: args, sizes(1, 1))


@pytest.mark.parametrize(
    ("rank", "island", "lines"), [(0, None, 1), (1, None, 0), (0, 0, 1), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
)
def test_one_rank_says_what_is_lost(rank, island, lines, monkeypatch, capsys):
    """The first, and of islands the first one's."""
    monkeypatch.setattr(megatron_training, "usage_errors", contextlib.nullcontext)
    for name in ("_claim_delivery_log", "check_run"):
        monkeypatch.setattr(megatron_training, name, lambda *_, **__: None)
    lossy = Lossy(LossyConfig(p_grad=0.1))
    if island is not None:
        lossy.job, lossy.jobs = island, 2
    args = types.SimpleNamespace(
        use_distributed_optimizer=True, optimizer="adam", data_parallel_size=2, train_iters=5, rank=rank
    )
    megatron_training.validate_args(lossy, lambda args: args, args)
    assert capsys.readouterr().out.count("loss: ") == lines


def test_experts_of_several_ranks_may_be_all_that_loses():
    """Tensor parallelism of 2 without that of experts: dense size 1, experts on two ranks."""
    args = types.SimpleNamespace(
        num_experts=4, expert_tensor_parallel_size=1, expert_model_parallel_size=1, tensor_model_parallel_size=2
    )
    args.world_size = 2
    assert _expert_data_parallel_ranks(args) == 2
    args.num_experts = None
    assert _expert_data_parallel_ranks(args) == 1


def refused(config, **settings):
    """The line with which Megatron's arguments ``settings``, without the distributed optimizer, are refused; "" if not."""
    arguments = types.SimpleNamespace(**{"optimizer": "adam", "use_distributed_optimizer": False, **settings})
    try:
        check_arguments(arguments, config)
    except UsageError as error:
        return str(error)
    return ""


NOISE = {"grad_error": "gaussian:1rms"}


def test_full_replicas_that_can_differ_have_no_loss_scale():
    repaired = LossyConfig(**NOISE, replica_check="repair")
    alike = LossyConfig(**NOISE, grad_error_at="reduce")
    for settings, line in (
        ({"bf16": True, "loss_scale": 64.0}, "--loss-scale 64: without the distributed optimizer"),
        ({"fp16": True, "loss_scale": 64.0}, "--fp16 with --loss-scale 64: without"),
        ({"fp16": True, "loss_scale": None}, "--fp16 on: without"),
        ({"fp16": True}, "--fp16 on: without"),  # as a model has it
        ({"bf16": True, "loss_scale": None}, ""),
        ({"loss_scale": 64.0}, ""),  # Megatron scales none in float32
    ):
        for flags in (NOISE, {"param_sync_interval": 2}):
            told = refused(LossyConfig(**flags), **settings)
            assert told.startswith(line) and bool(told) == bool(line), settings
        assert refused(repaired, **settings) == refused(alike, **settings) == ""


def test_stages_with_a_tied_embedding_have_at_most_two_replicas_to_average():
    line = "--pipeline-model-parallel-size 2: two stages have a copy of the embedding, which {} would round apart"
    for flags, what in (
        ({"param_sync_interval": 2}, "--param-sync-interval"),
        ({"replica_check": "repair"}, "--replica-check repair"),
        ({"replica_check": "log"}, None),
    ):
        for replicas, stages, untied in ((3, 2, False), (2, 2, False), (3, 1, False), (3, 2, True)):
            facts = Facts(pipeline=stages, tied=not untied, workers=replicas)
            wrong = what and (replicas, stages, untied) == (3, 2, False)
            with pytest.raises(UsageError, match=line.format(what)) if wrong else contextlib.nullcontext():
                check_refusals(LossyConfig(**flags), facts)
    predicting = Facts(pipeline=2, tied=False, predicts_more_tokens=True, workers=3)
    with pytest.raises(UsageError, match=line.format("--param-sync-interval")):
        check_refusals(LossyConfig(param_sync_interval=2), predicting)


def test_hashes_of_weights_are_compared_where_replicas_cannot_differ():
    line = "--check-weight-hash-across-dp-replicas-interval 5: ends runs whose replicas differ"
    for flags, wrong in (
        (NOISE, True),
        (NOISE | {"grad_error_at": "reduce"}, False),
        (NOISE | {"replica_check": "repair"}, False),
        ({"param_sync_interval": 5}, False),
    ):
        told = refused(LossyConfig(**flags), check_weight_hash_across_dp_replicas_interval=5)
        assert told.startswith(line) if wrong else told == "", flags


@pytest.mark.parametrize("flags", [{"p_param": 0.1}, {"transport": "udp"}])
def test_a_run_warns_that_nothing_is_lost_between_optimizer_instances(flags, caplog):
    said = "--num-distributed-optimizer-instances 2: the exchange between instances stays reliable; --sites M makes"
    config = LossyConfig(**flags)
    check_run(config, Facts(workers=4, optimizer_instances=1))
    check_run(LossyConfig(), Facts(workers=4, optimizer_instances=2))
    assert said not in caplog.text
    check_run(config, Facts(workers=4, optimizer_instances=2))
    assert said in caplog.text
