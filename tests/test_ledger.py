"""The ledger: what is patched exists and fits, every patch explains itself, installing is all or nothing."""

import re
from pathlib import Path

import pytest

from megatron_lossy.base import device
from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.ledger import Ledger, Patch, Signature, check
from megatron_lossy.lab.doctor.found import check_patches

pytestmark = pytest.mark.shows("patches fit, explain themselves, come and go as a whole", device=False)

ROOT = Path(__file__).parents[1]


def patch(target, value=None, **options):
    return Patch(target=target, value=lambda: value, why="it is a test", **options)


def taken(output_tensor, input_tensor, op=None, *, group=None):
    pass


@pytest.mark.parametrize(
    ("takes", "fits"),
    [
        (Signature(), True),
        (Signature(("output|output_tensor", "input_tensor")), True),
        (Signature(("output_tensor",), named=("op", "group")), True),
        (Signature(("output_tensor", "input_tensor"), named=("op",), others=("group", "async_op")), True),
        (Signature(("input_tensor",)), False),
        (Signature(("output_tensor", "input_tensor", "op", "group")), False),  # which is no positional one
        (Signature(named=("async_op",)), False),
        (Signature(("output_tensor", "input_tensor"), others=("op",)), False),
    ],
    ids=str,
)
def test_signatures_that_fit(takes, fits):
    assert takes.fits(taken) == fits
    assert takes.fits(lambda *args, **kwargs: None)  # somebody's wrapper


def test_what_has_no_signature_does_not_fit():
    assert not Signature().fits(max)


def refused(takes):
    return patch(f"{__name__}:taken", takes=takes)


def test_an_unexpected_signature_is_refused_and_nothing_is_changed():
    import megatron.core

    ledger, original = Ledger("test"), taken
    with pytest.raises(UsageError) as error:
        ledger.install([refused(None), refused(Signature(("self",), named=("when",)))])
    text = str(error.value)
    assert "\n" not in text and f"{__name__}:taken" in text and megatron.core.__version__ in text
    assert "(output_tensor, input_tensor, op=None, *, group=None)" in text and "(self, when=, ...)" in text
    assert taken is original and not ledger.installed


def test_a_check_says_what_it_found():
    fits = check(refused(Signature(("output_tensor",))))
    assert (fits.found, fits.problem) == (True, "")
    absent = patch(f"{__name__}:absent", optional=True)
    assert (check(absent).found, check(absent).problem) == (False, "")
    there_is_none = patch("no_such_module:name")
    assert "no_such_module" in check(there_is_none).problem


def test_every_patch_fits_the_megatron_that_is_here():
    device.prepare_import()
    checks = check_patches()
    assert len(checks) >= 10
    assert [entry.problem for entry in checks if entry.problem] == []


def every_patch():
    """Every patch of the package, in the Megatron that is here."""
    from megatron_lossy.base.device import cpu, cpu_training
    from megatron_lossy.config import LossyConfig
    from megatron_lossy.hooks import megatron_core, megatron_training
    from megatron_lossy.hooks.runtime import Lossy
    from megatron_lossy.lab.calibration import job
    from megatron_lossy.lab.launch import agent
    from megatron_lossy.mechanisms.islands import megatron_training as island_training
    from megatron_lossy.plugin import _command_line_patches, _program_patches

    run = Lossy(LossyConfig(eval_weights="both", sites=2, p_grad=0.1))
    return [
        *megatron_core.patches(run),
        *megatron_training.flag_patches(),
        *megatron_training.patches(run),
        *island_training.patches(None),
        island_training.train_patch(print),
        *_command_line_patches(),
        *_program_patches(),
        *cpu.import_patches(),
        *cpu.patches(),
        agent._noting_ends([]),
        job._WEIGHTS_OF_THE_CPU,
        *cpu_training.patches(),
    ]


def test_every_patch_explains_itself():
    """Each patch has a reason; the code has no patch that is missing here."""
    patches = every_patch()
    for one in patches:
        module, _, attribute = one.target.partition(":")
        assert module and attribute, one.target
        assert len(one.why.split()) >= 3, f"{one.target} does not say why: {one.why!r}"
    targets = {one.target.partition(":")[2].rpartition(".")[2] for one in patches}
    in_code = set()
    for file in (ROOT / "megatron_lossy").rglob("*.py"):
        in_code |= set(re.findall(r'target=f?"[^":]*:([^"]*)"', file.read_text()))
    elsewhere = {"get_grad_norm_fp32", "clip_grad_by_total_norm_fp32", "_ParamAndGradBuffer", "mp"}
    elsewhere |= {"_compute_per_buffer_param_layout"}
    literal = {target.rpartition(".")[2] for target in in_code if "{" not in target} - elsewhere
    assert literal <= targets, literal - targets


def test_a_patch_is_called_with_the_original():
    """Around functions and static methods; one that was absent is None."""
    seen = []

    def around(original, *args, **kwargs):
        seen.append(original)
        return (args, kwargs) if original is None else original(*args, **kwargs) + 1

    records = [
        Patch(target=f"{__name__}:Target.{name}", around=around, why="w", create=name == "new")
        for name in ("method", "static", "new")
    ]
    originals = Target.__dict__["method"], Target.__dict__["static"]
    ledger = Ledger("test")
    ledger.install(records)
    assert Target().method() == 3 and Target.static(4) == 5 and Target.new(1, a=2) == ((1,), {"a": 2})
    assert Target.method.__name__ == "method" and seen == [originals[0], originals[1].__func__, None]
    ledger.uninstall()
    assert (Target.__dict__["method"], Target.__dict__["static"]) == originals and not hasattr(Target, "new")


class Target:
    kept = 1

    def method(self):
        return 2

    @staticmethod
    def static(value):
        return value


def of_target(attribute, value, **options):
    return patch(f"{__name__}:Target.{attribute}", value, **options)


def test_installing_is_all_or_nothing():
    ledger = Ledger("test")
    with pytest.raises(UsageError, match="absent"):
        ledger.install([of_target("kept", 5), of_target("absent", 6)])
    assert Target.kept == 1 and not ledger.installed
    ledger.install([of_target("kept", 5), of_target("absent", 6, optional=True), of_target("new", 7, create=True)])
    assert (Target.kept, Target.new) == (5, 7)
    ledger.uninstall()
    assert Target.kept == 1 and not hasattr(Target, "new")


bound = also = taken


def test_a_target_that_is_bound_to_another_replacement_of_ours_gets_its_original():
    """As Megatron's reduce-scatter is, when DDP is built."""
    ledger = Ledger("test")
    ledger.install([patch(f"{__name__}:bound", "one"), patch(f"{__name__}:taken", "two")])
    globals()["bound"] = taken
    ledger.uninstall()
    assert bound is taken is also and not ledger.installed


def test_a_later_patch_is_not_clobbered():
    ledger = Ledger("test")
    original = Target.__dict__["method"]
    ledger.install([of_target("method", lambda self: 3)])
    ours = Target.__dict__["method"]
    Target.method = lambda self: 4
    with pytest.raises(RuntimeError, match="something else replaced it"):
        ledger.uninstall()
    Target.method = ours
    ledger.uninstall()
    assert Target.__dict__["method"] is original
