"""The ledger's knowledge of Megatron: what is patched exists and takes what the replacements rely on."""

import pytest

from megatron_lossy import device, hooks
from megatron_lossy.errors import UsageError
from megatron_lossy.ledger import Ledger, Patch, Takes, check, signature_of


def taken(output_tensor, input_tensor, op=None, *, group=None):
    pass


@pytest.mark.parametrize(
    "takes",
    [
        Takes(),
        Takes(("output|output_tensor", "input_tensor")),
        Takes(("output_tensor",), named=("op", "group")),
        Takes(("output_tensor", "input_tensor"), named=("op",), others=("group", "async_op")),
    ],
    ids=str,
)
def test_signatures_that_fit(takes):
    assert takes.fits(taken)
    assert takes.fits(lambda *args, **kwargs: None)  # somebody's wrapper


@pytest.mark.parametrize(
    "takes",
    [
        Takes(("input_tensor",)),
        Takes(("output_tensor", "input_tensor", "op", "group")),  # which is no positional one
        Takes(named=("async_op",)),
        Takes(("output_tensor", "input_tensor"), others=("op",)),
    ],
    ids=str,
)
def test_signatures_that_do_not(takes):
    assert not takes.fits(taken)


def test_what_has_no_signature_does_not_fit():
    assert not Takes().fits(max) and signature_of(max) == "unknown"
    assert signature_of(taken) == "(output_tensor, input_tensor, op=, group=)"


def refused(takes):
    return Patch(f"{__name__}:taken", lambda original: None, "it is a test", "all", "never", takes=takes)


def test_an_unexpected_signature_is_refused_and_nothing_is_changed():
    import megatron.core

    ledger, original = Ledger("test"), taken
    with pytest.raises(UsageError) as error:
        ledger.install([refused(None), refused(Takes(("self",), named=("when",)))])
    text = str(error.value)
    assert "\n" not in text and f"{__name__}:taken" in text and megatron.core.__version__ in text
    assert "(output_tensor, input_tensor, op=, group=)" in text and "(self, when=, ...)" in text
    assert taken is original and not ledger.installed


def test_a_check_says_what_it_found():
    fits = check(refused(Takes(("output_tensor",))))
    assert (fits.found, fits.ok, fits.problem) == (True, True, "")
    absent = Patch(f"{__name__}:absent", lambda original: None, "it is a test", "all", "never", optional=True)
    assert (check(absent).found, check(absent).ok) == (False, True)
    there_is_none = Patch("no_such_module:name", lambda original: None, "it is a test", "all", "never")
    assert not check(there_is_none).ok and "no_such_module" in check(there_is_none).problem


def test_every_patch_fits_the_megatron_that_is_here():
    device.prepare_import()
    checks = hooks.check_patches()
    assert len(checks) >= 10
    assert [entry.problem for entry in checks if not entry.ok] == []
    assert all(entry.signature for entry in checks if entry.found and "dist_" in entry.target)
