"""An example of each refusal, in the order of the table: loss flags, facts that are all needed, how the line begins."""

GRAD = {"p_grad": 0.1}
PARAM = {"p_param": 0.1}
PACKETS = {"loss_unit": "packet"}
UDP = {"transport": "udp"}
STREAM = {"transport": "stream"}
ACT = {"p_act": 0.1}
VIRTUAL = ACT | {"virtual_boundaries": (1, 3)}
ASYNC = {"async_pipeline": True}
STAGES = ASYNC | {"virtual_stages": 2}
NOISE = {"grad_error": "gaussian:1rms"}
AVERAGED = {"param_sync_interval": 5}
FIRST = PACKETS | {"grad_priority": "packet-mean"}
FEEDBACK = UDP | {"grad_recovery": "error-feedback"}
ISLANDS = {"islands": 2, "sync_method": "parameters"}
CHURN = {"island_schedule": "events"}
APART = ISLANDS | {"rendezvous": "etcd://host/run", "island": 1}
PARTS = APART | {"sync_ranks": 2}
OUTER = {"islands": 2, "sync_method": "diloco"}
EMA = ISLANDS | {"delay_correction": "ema"}
FULL = {"distributed_optimizer": False}
SHARDED = {"distributed_optimizer": True}


def on(flag):
    return {"switches": frozenset({flag})}


CORE = [
    (GRAD, {"optimizer": "muon", "layer_wise": True}, "--optimizer muon: layer-wise optimizers gather differently"),
    (GRAD, {"layer_wise_parameters": True}, "LayerWiseDistributedOptimizer: layer-wise optimizers gather"),
    (GRAD, on("--use-megatron-fsdp"), "--use-megatron-fsdp: cannot go with loss (Megatron-FSDP shards by itself)"),
    (GRAD, on("--use-torch-fsdp2"), "--use-torch-fsdp2: cannot go with loss (torch FSDP shards"),
    (GRAD, on("--optimizer-cuda-graph"), "--optimizer-cuda-graph: cannot go with loss (a captured graph"),
    (GRAD, on("--reuse-grad-buf-for-mxfp8-param-ag"), "--reuse-grad-buf-for-mxfp8-param-ag: cannot go with loss"),
    (GRAD, {"full_iteration_graph": True}, "--cuda-graph-scope full_iteration: a captured graph repeats"),
    (PARAM, on("--fp8-param-gather"), "--fp8-param-gather with parameter loss: stale bytes"),
    (GRAD | PACKETS | {"packet_bytes": 3}, {"gradient_bytes": 4, "weight_bytes": 2}, "--packet-bytes 3: must hold at"),
    ({"grad_error": "bit-flip:1,10,20"}, {"gradient_bytes": 2}, "--grad-error bit-flip:1,10,20: needs 0 <= LOW <="),
    (GRAD | {"save_replicas": True}, {"non_persistent_checkpoints": "local"}, "--non-persistent-ckpt-type local: such"),
    (GRAD | {"grad_recovery": "previous"}, {"per_token_loss": True}, "--grad-recovery previous: mixes gradients of"),
]

SHARDED_COPIES = {"data_parallel": "FSDP2", "tensor": 2}
PYTORCH = [
    (GRAD | {"eval_weights": "owner"}, {"data_parallel": "FSDP2"}, "--eval-weights owner: is of training programs"),
    (PARAM, {"data_parallel": "DDP"}, "--p-param 0.1: each replica updates all parameters, and sends none"),
    (UDP, {"data_parallel": "DDP"}, "--transport udp: carries no all-reduce; choose pieces or torch, or shard"),
    (UDP, SHARDED_COPIES, "--transport udp: loses other units of each copy of a parameter"),
    (GRAD | PACKETS | {"grad_recovery": "error-feedback"}, SHARDED_COPIES, "--grad-recovery error-feedback: would"),
]

TRANSPORT = [
    (UDP | {"loss_unit": "shard"}, {}, "--loss-unit shard: must be packet with --transport udp"),
    (UDP | {"lossy_self": True}, {}, "--lossy-self with --transport udp: cannot be: the own shard never crosses"),
    (UDP, {"torch": "2.7.1+cpu"}, "--transport udp: needs torch 2.8 or later under Megatron, this is 2.7.1+cpu"),
    (UDP, {"virtual": True}, "--transport udp: needs real ranks: virtual workers exchange in memory"),
    (UDP, {"in_memory": True}, "--transport udp: must be torch or pieces: workers of one process exchange in memory"),
    (UDP, FULL, "--transport udp: carries no all-reduce; needs Megatron's distributed optimizer"),
    (UDP | {"udp_port": 65530}, {"ranks_of_host": 8}, "--udp-port 65530: must be at most 65528: each of the 8 ranks"),
    (UDP | {"udp_memory": 2**23}, {"largest_group": 1024}, "--udp-memory 8388608: must be at least 11534336: room"),
]

SITES = {"sites": 2}
SITE = [
    (SITES | {"lossy_links": "inter-node"}, {}, "--lossy-links inter-node: names the links that lose data, as --sites"),
    (SITES | ISLANDS, {}, "--islands 2: averages every few iterations what sites exchange in each"),
    (SITES | ACT, {}, "--p-act 0.1: loses messages between stages, which are all inside a site"),
    (SITES | ASYNC, {}, "--async-pipeline on: exchanges micro-batches of several ages"),
    (SITES, FULL, "--sites 2: is for shards of gradients and parameters; needs Megatron's distributed optimizer"),
    (SITES, {"data_parallel": "DDP"}, "--sites 2: is for shards of gradients and parameters; shard the model"),
    (SITES, {"in_memory": True}, "--sites 2: needs real ranks or --virtual-workers"),
    (SITES, {"optimizer_instances": 2}, "--num-distributed-optimizer-instances 2: must be 1 with --sites"),
    (SITES, {"pipeline": 2, "stages_inside": False}, "--pipeline-model-parallel-size 2: needs --use-tp-pp-dp-mapping"),
    (SITES, {"workers": 3}, "--sites 2: must divide the 3 data-parallel ranks"),
]

_ISLAND_SWITCHES = {
    "--use-checkpoint-args": "each island has a folder",
    "--use-mp-args-from-checkpoint-args": "each island has a folder",
    "--fp8-param-gather": "weights of 8 bits",
    "--exit-duration-in-mins": "islands would stop after different iterations",
    "--use-precision-aware-optimizer": "its weights in float32",
    "--optimizer-cpu-offload": "its weights are elsewhere",
    "--overlap-param-gather-with-optimizer-step": "weights are gathered before",
    "--hybrid-context-parallel": "its samples cannot be divided",
    "--moe-router-enable-expert-bias": "islands would balance",
    "--phase-transition-iterations": "samples of a phase",
}
ISLAND = [
    (ISLANDS | {"drift_interval": 5}, {}, "--drift-interval 5: cannot be combined with --islands"),
    (ISLANDS | {"eval_weights": "owner"}, {"virtual": False}, "--eval-weights owner: every island has owners"),
    (ISLANDS | {"island_speeds": (1.0, 2.0), "delivery_log": "log"}, {}, "--delivery-log log: cannot be combined"),
    (ISLANDS, {"worlds_apart": False}, "--islands 2: needs a launcher of this package"),
    *((ISLANDS, on(flag), f"{flag}: cannot go with --islands ({why}") for flag, why in _ISLAND_SWITCHES.items()),
    (ISLANDS | {"save_consensus": True}, {"saves": False}, "--save-consensus on: needs --save"),
    (ISLANDS, {"dataloader": "external"}, "--dataloader-type external: its samples cannot be divided"),
    (OUTER, {"virtual": False, "saves": True}, "--sync-method diloco: keeps its outer weights in a checkpoint with"),
    (ISLANDS, {"virtual": False, "optimizer_instances": 2}, "--num-distributed-optimizer-instances 2: several ranks"),
    (ISLANDS, {"virtual": False, "pipeline": 2, "predicts_more_tokens": True}, "--pipeline-model-parallel-size 2: two"),
    (
        {"islands": 2, "sync_method": "eager-diloco", "sync_delay": 1, "sync_dtype": "int8"},
        {},
        "--sync-dtype int8: loses steps smaller than the rounding with --delay-correction none and eager-diloco",
    ),
    (ISLANDS | {"sync_dtype": "int4"}, {}, "--sync-dtype int4: is too coarse for weights, which --sync-method"),
    (OUTER | {"sync_dtype": "int8"}, {"virtual": False, "tensor": 2}, "--sync-dtype int8: cannot go with tensor"),
    (ISLANDS | UDP, {"virtual": False, "tensor": 2, "experts": 4}, "--transport udp: tensor-parallel ranks would lose"),
    (ISLANDS, {"data_parallel": "DDP"}, "--islands 2: averages the shards of an optimizer; shard the model with fully"),
    (ISLANDS, FULL, "--islands 2: each shards its optimizer; needs --use-distributed-optimizer"),
    (ISLANDS, {"workers": 3}, "--islands 2: must divide the 3 data-parallel ranks"),
    (ISLANDS | {"island_speeds": (1.0, 2.0)}, {"virtual": False}, "--island-speeds 1.0 2.0: needs --virtual-workers"),
    (ISLANDS | CHURN, {"virtual": False}, "--island-schedule events: is for islands in one process"),
    (ISLANDS | CHURN | {"island_speeds": (1.0, 2.0)}, {}, "--island-schedule events: cannot be combined with"),
    (ISLANDS | {"island_keep": 3}, {"virtual": False}, "--island-keep 3: needs --island-schedule or --rendezvous"),
    (APART, {"virtual": True}, "--rendezvous etcd://host/run: is for real ranks"),
    (APART, {"virtual": False, "saves": True}, "--save: keeps who is there, and who listens, with --save-replicas"),
    (APART | {"async_pipeline": True}, {}, "--rendezvous etcd://host/run: cannot go with --async-pipeline"),
    (PARTS, {"flushes": True}, "--sync-ranks 2: needs python -m megatron_lossy.train"),
    (PARTS, {"tensor": 2}, "--sync-ranks 2: needs ranks that are whole replicas"),
    (PARTS, {"workers": 2}, "--sync-ranks 2: must be at most 1, the ranks of this island"),
    (PARTS | {"eval_weights": "both"}, {}, "--sync-ranks 2: cannot go with --save-consensus and --eval-weights both"),
    (APART | {"island_speeds": (1.0, 2.0)}, {}, "--island-speeds 1.0 2.0: cannot go with --rendezvous"),
    (ISLANDS | CHURN | PACKETS | {"delivery_log": "log", "p_sync": 0.1}, {}, "--delivery-log log: cannot go with"),
    (ISLANDS | {"sync_subset": "partition", "sync_fraction": 0.5}, {"device": "hpu"}, "--sync-subset partition: draws"),
    (ISLANDS | UDP | {"sync_subset": "bernoulli"}, {"virtual": False}, "--sync-subset bernoulli: cannot go with"),
    (ISLANDS | UDP | {"delivery_log": "log"}, {"virtual": False}, "--delivery-log log: cannot go with --islands and"),
    (
        {"islands": 2, "sync_method": "eager-diloco", "sync_delay": 1, "p_sync": 0.1},
        {"workers": 4},
        "--sync-method eager-diloco: cannot lose exchanges (--p-sync, traces, --transport udp or stream)",
    ),
    (ISLANDS | GRAD, {"workers": 2}, "--islands 2: islands of one worker exchange no gradients and no parameters"),
    (
        {"islands": 2, "sync_method": "none", "island_speeds": (1.0, 20.0)},
        {"train_iters": 3},
        "--train-iters 3: leaves the slowest island without an iteration",
    ),
    (ISLANDS | {"sync_interval": 9}, {"train_iters": 8}, "--sync-interval 9: must be at most 8, the iterations"),
    (ISLANDS | {"sync_interval": 2, "sync_delay": 7}, {"train_iters": 8}, "--sync-delay 7: must be at most 6, for"),
    (EMA, {"ends": False}, "--delay-correction ema: falls until --train-iters, which is not known"),
    (
        EMA | {"sync_delay": 3, "delay_correction": "ema:0.9,0.9,1000"},
        {"workers": 4},
        "--delay-correction ema:0.9,0.9,1000: diverges: must be below 0.445 with 3 later exchanges of an element under way",
    ),
    (
        ISLANDS | {"sync_delay": 3, "delay_correction": "mixing:0.5"},
        {"workers": 4},
        "--delay-correction mixing:0.5: diverges: must be below 0.445 with 3 later exchanges of an element under way",
    ),
]

BOUNDARIES = [
    ({"virtual_boundaries": (1,), "lossy_links": "inter-node"}, {}, "--virtual-boundaries 1: cannot be on a node:"),
    ({"p_act_grad": 0.2}, {"pipeline": 1}, "--p-act-grad 0.2: nothing is sent with one pipeline stage; needs more of"),
    (ACT, {"virtual": True}, "--p-act 0.1: needs --virtual-boundaries in one process"),
    (VIRTUAL, {"pipeline": 2}, "--virtual-boundaries 1 3: needs one pipeline stage, not 2"),
    (VIRTUAL, {"layers": 1}, "--virtual-boundaries 1 3: a model of 1 layer has no boundary"),
    (VIRTUAL, {"layers": 3}, "--virtual-boundaries 1 3: must be layers from 1 to 2 of the 3"),
    (VIRTUAL, {"recompute": "full"}, "--recompute-granularity full: --virtual-boundaries would lose other packets"),
    (VIRTUAL, {"layer_graphs": True}, "CUDA graphs of layers: would lose the same or nothing"),
    (VIRTUAL, on("--overlap-moe-expert-parallel-comm"), "--overlap-moe-expert-parallel-comm on: runs layers in parts"),
    (ACT, on("--use-ring-exchange-p2p"), "--use-ring-exchange-p2p on: nothing can be lost at stage boundaries"),
    (ACT, on("--mtp-standalone"), "multi-token prediction on a stage of its own: cannot go with --p-act and"),
    (ACT | {"packet_bytes": 3}, {"message_bytes": 4}, "--packet-bytes 3: must hold at least one element of 4 bytes"),
    (ACT, {"pipelines": 2}, "pipelines of encoder and decoder with their own sizes: cannot go with --p-act and"),
    (ACT, {"several_modules": True}, "MultiModulePipelineCommunicator: cannot go with --p-act and --p-act-grad, which"),
    (ACT, FULL, "--p-act 0.1: needs Megatron's distributed optimizer, and --use-distributed-optimizer is off"),
    (VIRTUAL, {"data_parallel": "FSDP2"}, "--p-act 0.1: loses messages between layers and stages of Megatron"),
]

ASYNC_PIPELINE = [
    (ASYNC, {"flushes": True}, "--async-pipeline on: needs python -m megatron_lossy.train; the loop of Megatron-LM"),
    (STAGES, {"virtual": False}, "--virtual-stages 2: needs --virtual-workers"),
    (ASYNC | ACT, {"virtual": False}, "--p-act 0.1: cannot be with --async-pipeline, whose messages between stages"),
    (ASYNC, {"virtual": False, "optimizer_instances": 2}, "--num-distributed-optimizer-instances 2: must be 1 with"),
    (ASYNC, {"virtual": True}, "--async-pipeline on: needs --virtual-stages with --virtual-workers"),
    (STAGES, FULL, "--virtual-stages 2: needs --use-distributed-optimizer"),
    (STAGES, {"layers": 5}, "--virtual-stages 2: must divide the 5 layers"),
    (ASYNC, {"pipeline": 2, "layers": 5}, "--pipeline-model-parallel-size 2: must divide the 5 layers"),
    (STAGES, {"tied": True}, "--share-embeddings-and-output-weights on: cannot be with --async-pipeline: the first"),
    (STAGES, {"overlap_param_gather": True}, "--overlap-param-gather on: cannot be with --async-pipeline: forward"),
    (STAGES, {"fp16": True}, "--fp16: cannot be with --async-pipeline: an overflow in one stage"),
    (ASYNC, {"pipeline": 2, "experts": 8}, "--num-experts: cannot be with --async-pipeline: its balance of load"),
    (ASYNC, {"pipeline": 2, "virtual_pipeline": 2}, "--num-layers-per-virtual-pipeline-stage: cannot be with"),
    (STAGES, {"layer_graphs": True}, "CUDA graphs: cannot be with --async-pipeline: a captured graph has one"),
    (STAGES, {"predicts_more_tokens": True}, "--mtp-num-layers: cannot be with --async-pipeline: its layers are"),
]

_APART = "without the distributed optimizer, replicas that differ would skip different updates"
_UPDATES = "needs replicas that each update everything; parameters that are lost belong to the distributed optimizer"
_WHOLE = "needs replicas that each have all of the optimizer (in the trainer --no-use-distributed-optimizer)"
_HASH = "--check-weight-hash-across-dp-replicas-interval"
REPLICAS = [
    (PARAM | AVERAGED, {}, f"--param-sync-interval 5: {_UPDATES}"),
    (PARAM | {"replica_check": "log"}, {}, f"--replica-check log: {_UPDATES}"),
    (PARAM | NOISE, {}, f"--grad-error-at broadcast: {_UPDATES}"),
    ({"grad_error": "gaussian:0.5"}, {"per_token_loss": True}, "--grad-error gaussian:0.5: gradients are sums over"),
    (AVERAGED | {"param_sync_rule": "snr"}, {"per_token_loss": True}, "--param-sync-rule snr: gradients are sums"),
    (AVERAGED, SHARDED, f"--param-sync-interval 5: {_WHOLE}; with the distributed optimizer the all-gather already"),
    ({"replica_check": "log"}, SHARDED, f"--replica-check log: {_WHOLE}; with the distributed optimizer each"),
    (NOISE, SHARDED, f"--grad-error-at broadcast: {_WHOLE}; with the distributed optimizer choose reduce"),
    (PARAM, FULL, "--p-param 0.1: needs Megatron's distributed optimizer, and --use-distributed-optimizer is off"),
    (GRAD, FULL, "--p-grad 0.1: needs Megatron's distributed optimizer, and --use-distributed-optimizer is off"),
    (GRAD, FULL | {"data_parallel": "DDP"}, "--p-grad 0.1: drives replicas apart; needs --param-sync-interval"),
    (NOISE, FULL | {"fp16": True}, f"--fp16 on: {_APART}"),
    (AVERAGED, FULL | {"loss_scale": 64.0}, f"--loss-scale 64: {_APART}"),
    (AVERAGED, FULL | on("--optimizer-cpu-offload"), "--optimizer-cpu-offload: replicas are averaged where they are"),
    (NOISE, FULL | {"weight_hash_interval": 5}, f"{_HASH} 5: ends runs whose replicas differ"),
    (PARAM, {"weight_hash_interval": 5}, f"{_HASH} with parameter loss: replicas differ on purpose"),
    (AVERAGED, {"workers": 3, "pipeline": 2, "tied": True}, "--pipeline-model-parallel-size 2: two stages have a"),
]

PRIORITY = [
    (
        {"loss_unit": "shard", "grad_priority": "packet-mean", "grad_recovery": "error-feedback"},
        {},
        "--grad-priority packet-mean: needs --loss-unit packet, or --grad-priority none",
    ),
    ({"grad_priority": "packet-mean"}, {}, "--grad-priority packet-mean: needs --loss-unit packet"),
    (FIRST | {"grad_recovery": "previous"}, {}, "--grad-priority packet-mean with --grad-recovery previous: cannot"),
    (UDP | FIRST | GRAD, {}, "--transport udp with gradients lost by drawing, and --grad-priority or error-feedback:"),
    (STREAM | FIRST, {}, "--transport stream with --grad-priority or error-feedback: cannot be: senders get no report"),
    (UDP | FIRST | {"packet_bytes": 8}, {}, "--packet-bytes 8: must be at least 16 with --grad-priority over UDP"),
    (FIRST | GRAD, {"virtual": False}, "--grad-priority packet-mean with --grad-recovery renormalize: needs virtual"),
    (FEEDBACK, {"per_token_loss": True}, "--grad-recovery error-feedback with --transport udp: gets the report of"),
    (FEEDBACK, {"pipeline": 2, "tied": True}, "--grad-recovery error-feedback with --transport udp: gets the report"),
    (FEEDBACK | {"udp_deadline": "50"}, {"tensor": 2}, "--udp-deadline 50: would keep other residuals on each"),
]

COMPRESSION = [
    ({"param_wire": "int8"}, {}, "--param-wire int8: needs --loss-unit packet"),
    (PACKETS | {"grad_wire": "int8", "packet_bytes": 64}, {}, "--packet-bytes 64: holds no block of 128 (int8 needs"),
    ({"grad_wire": "int8"}, {"virtual": False}, "--grad-wire int8: needs --transport pieces, or without --islands udp"),
    ({"grad_wire": "int4", "param_sync_interval": 10**6}, FULL, "--grad-wire int4: no all-reduce carries codes;"),
    ({"grad_wire": "int8"}, {"data_parallel": "DDP"}, "--grad-wire int8: no all-reduce carries codes; shard the model"),
    ({"grad_wire": "int8"}, {"copies_apart": True}, "--grad-wire int8: tensor-parallel copies that Megatron does not"),
]

NODES = {"lossy_links": "inter-node", "p_grad": 0.1}
WORKERS = [
    (NODES, {"virtual": True}, "--lossy-links inter-node: needs inter-node:N with --virtual-workers"),
    (
        {"p_grad": 0.1, "lossy_links": "inter-node:4"},
        {"virtual": True, "workers": 4},
        "--lossy-links inter-node:4: puts all 4 ranks on one node: no link leaves a node, and nothing can be lost",
    ),
    (GRAD, {"virtual": True, "gradients_beside_buffers": True}, "--ddp-param-name-patterns-for-fp32"),
    (NOISE | {"grad_error_ranks": (1, 5, 9)}, {"workers": 4}, "--grad-error-ranks 5: must be below the 4"),
    (GRAD, {"largest_group": 1}, "data-parallel size 1: one rank exchanges nothing, so that nothing can be lost"),
]

EXAMPLES = [
    *CORE,
    *PYTORCH,
    *TRANSPORT,
    *WORKERS,
    *SITE,
    *ISLAND,
    *BOUNDARIES,
    *ASYNC_PIPELINE,
    *REPLICAS,
    *PRIORITY,
    *COMPRESSION,
]
