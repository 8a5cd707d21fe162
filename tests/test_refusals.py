"""The table of refusals: every row is reached, its order is one, each source of facts says the same; and as readers see it."""

import ast
import dataclasses
import types

import pytest
import torch

from megatron_lossy import __main__ as command
from megatron_lossy.base.registry import MECHANISMS
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.facts import Facts
from megatron_lossy.config.refusal import RefusalError, check_refusals, sections
from megatron_lossy.hooks.facts import of_arguments, of_model
from megatron_lossy.lab.train.config import TrainConfig
from megatron_lossy.lab.train.facts import of_trainer
from scripts.update_docs import refusal_table
from tests.refusal_examples import EXAMPLES
from tests.trainer import ROOT, TINY

pytestmark = pytest.mark.shows(
    "every refusal is reached, in one order, for each source of facts",
    "the list of refusals: command and page",
    device=False,
)

PACKAGE = ROOT / "megatron_lossy"
ROWS = [row for section in sections() for row in section.rows]


def refused(flags, facts):
    """The error of ``flags`` in a run with ``facts``; ``None`` if there is none."""
    try:
        check_refusals(LossyConfig(**flags), facts)
    except RefusalError as error:
        return error
    return None


def test_every_row_has_its_example_in_the_order_of_the_table():
    found = [refused(flags, Facts(**facts)) for flags, facts, _ in EXAMPLES]
    assert None not in found
    assert [error.refusal for error in found] == ROWS


@pytest.mark.parametrize(("flags", "facts", "line"), EXAMPLES, ids=[f"{n} {e[2][:30]}" for n, e in enumerate(EXAMPLES)])
def test_a_refusal_names_flag_and_value_and_needs_all_its_facts(flags, facts, line):
    """An unknown fact refuses nothing: not by the row of the example, at least."""
    error = refused(flags, Facts(**facts))
    assert str(error).startswith(line) and "\n" not in str(error) and "{" not in str(error)
    for name in facts:
        if name != "optimizer":  # which is only named
            left = refused(flags, Facts(**{key: value for key, value in facts.items() if key != name}))
            assert left is None or left.refusal is not error.refusal, name


def test_without_loss_flags_nothing_is_refused():
    for _, facts, _ in EXAMPLES:
        if "gradients_beside_buffers" not in facts:  # which virtual workers need whatever they lose
            assert refused({}, Facts(**facts)) is None


def test_of_several_wrong_flags_the_first_of_the_table_is_named():
    flags = {"p_grad": 0.1, "grad_recovery": "previous", "udp_port": 65535, "transport": "udp", "p_act": 0.1}
    facts = {"per_token_loss": True, "ranks_of_host": 2, "pipeline": 1, "largest_group": 1}
    for name, line in (
        ("per_token_loss", "--grad-recovery previous: mixes gradients"),
        ("ranks_of_host", "--udp-port 65535: must be at most 65534"),
        ("largest_group", "data-parallel size 1: one rank"),
        ("pipeline", "--p-act 0.1: nothing is sent with one pipeline stage"),
    ):
        assert str(refused(flags, Facts(**facts))).startswith(line)
        del facts[name]
    assert refused(flags, Facts(**facts)) is None


class Trained:
    """One run by the facts of our trainer, of Megatron-LM's arguments and of a model."""

    def __init__(self, layers=4, stages=1, tensor=1, distributed=True, per_token=False, tied=True, bf16=False):
        world = 4 * stages * tensor
        self.trainer = of_trainer(
            TrainConfig(
                **TINY | {"num_layers": layers, "data": "stdlib", "global_batch_size": 8, "bf16": bf16},
                pipeline_model_parallel_size=stages,
                tensor_model_parallel_size=tensor,
                use_distributed_optimizer=distributed,
                calculate_per_token_loss=per_token,
                share_embeddings_and_output_weights=tied,
            ),
            world,
        )
        sizes = {
            "num_layers": layers,
            "pipeline_model_parallel_size": stages,
            "tensor_model_parallel_size": tensor,
            "calculate_per_token_loss": per_token,
            "bf16": bf16,
        }
        self.arguments = of_arguments(
            types.SimpleNamespace(
                **sizes,
                optimizer="adam",
                use_distributed_optimizer=distributed,
                untie_embeddings_and_output_weights=not tied,
                data_parallel_size=4,
                train_iters=8,
                save=None,
            )
        )
        module = torch.nn.Linear(2, 2)
        module.share_embeddings_and_output_weights = tied
        settings = types.SimpleNamespace(use_distributed_optimizer=distributed)
        ddp = types.SimpleNamespace(config=types.SimpleNamespace(**sizes), ddp_config=settings, module=module)
        ddp.buffers = ddp.expert_parallel_buffers = []
        self.model = Facts(workers=4) | of_model(ddp)

    def lines(self, **flags):
        """Return the refusals of ``flags`` by each."""
        return [str(refused(flags, facts)) for facts in (self.trainer, self.arguments, self.model)]


RUNS = [
    {},
    {"layers": 2, "stages": 2},
    {"distributed": False},
    {"distributed": False, "stages": 2},
    {"per_token": True},
    {"per_token": True, "distributed": False},
    {"tensor": 2, "bf16": True},
    {"stages": 2, "per_token": True, "tied": False},
]


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_all_sources_say_the_same_of_what_they_all_know(run):
    sources = [dataclasses.asdict(facts) for facts in vars(Trained(**run)).values()]
    known = {name for name in sources[0] if all(source[name] is not None for source in sources)}
    assert {"workers", "pipeline", "tensor", "layers", "tied", "per_token_loss", "distributed_optimizer"} <= known
    for name in known:
        assert len({source[name] for source in sources}) == 1, name


@pytest.mark.parametrize(
    ("run", "flags", "line"),
    [
        ({}, {"p_act": 0.1, "param_sync_interval": 5}, "--p-act 0.1: nothing is sent with one pipeline stage"),
        ({}, {"p_act": 0.1, "virtual_boundaries": (4,), "replica_check": "log"}, "--virtual-boundaries 4: must be lay"),
        ({"per_token": True}, {"p_grad": 0.1, "grad_recovery": "previous", "replica_check": "log"}, "--grad-recovery"),
        ({"per_token": True}, {"p_act": 0.1, "param_sync_interval": 5, "param_sync_rule": "snr"}, "--p-act 0.1: nothi"),
        ({"distributed": False}, {"p_act": 0.1, "p_param": 0.1, "virtual_boundaries": (1,)}, "--p-act 0.1: needs Meg"),
        ({"distributed": False}, {"p_grad": 0.1, "param_send": "compensated"}, "--p-grad 0.1: needs Megatron's"),
        (
            {"distributed": False, "stages": 2},
            {"param_sync_interval": 2, "replica_check": "repair"},
            "--pipeline-model-parallel-size 2: two stages have a copy of the embedding",
        ),
        (
            {"stages": 2, "per_token": True},
            {"transport": "udp", "grad_recovery": "error-feedback", "udp_deadline": "50"},
            "--grad-recovery error-feedback with --transport udp: gets the report of losses late, when --calculate-per",
        ),
    ],
)
def test_trainer_arguments_and_model_refuse_the_same_flag_first(run, flags, line):
    lines = Trained(**run).lines(**flags)
    assert len(set(lines)) == 1 and lines[0].startswith(line), lines


@pytest.mark.parametrize("path", ["hooks/checks.py", "lab/train/facts.py", "config/refusal.py", "config/refusals"])
def test_checks_guess_no_attribute(path):
    """Defaults of what a Megatron may lack are in ``hooks/facts.py`` alone."""
    files = [PACKAGE / path] if path.endswith(".py") else sorted((PACKAGE / path).glob("*.py"))
    assert files
    for file in files:
        names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        assert not names & {"getattr", "hasattr"}, file


def test_those_of_the_core_come_first():
    with_rows = [name for name in MECHANISMS if name != "lead"]
    assert [section.name for section in sections()] == ["core", "pytorch", "transport", "workers", "sites", *with_rows]


def test_each_section_is_in_the_page_and_in_the_command(capsys):
    page = (ROOT / "docs" / "refusals.md").read_text()
    command.main(["refusals"])
    told = capsys.readouterr().out
    at = -1
    for section in sections():
        assert refusal_table(section) in page
        assert told.index(f"{section.about} ({section.name})") > at
        at = told.index(f"{section.about} ({section.name})")
    command.main(["refusals", "async-pipeline"])
    one = capsys.readouterr().out
    assert one.count("--mtp-num-layers") == 1 and "--islands" not in one
