"""The ledger installs all or nothing, and takes back what it installed and nothing else."""

import pytest

from megatron_lossy.errors import UsageError
from megatron_lossy.ledger import Ledger, Patch


class Target:
    kept = 1

    def method(self):
        return 2


def patch(target, value, **options):
    return Patch(f"{__name__}:Target.{target}", lambda original: value, "test", "all", "never", **options)


def test_installing_is_all_or_nothing():
    ledger = Ledger("test")
    with pytest.raises(UsageError, match="absent"):
        ledger.install([patch("kept", 5), patch("absent", 6)])
    assert Target.kept == 1 and not ledger.installed
    ledger.install([patch("kept", 5), patch("absent", 6, optional=True), patch("new", 7, create=True)])
    assert (Target.kept, Target.new) == (5, 7)
    assert "Target.kept" in ledger.report() and "absent" not in ledger.report()
    ledger.uninstall()
    assert Target.kept == 1 and not hasattr(Target, "new")


def test_a_later_patch_is_not_clobbered():
    ledger = Ledger("test")
    original = Target.__dict__["method"]
    ledger.install([patch("method", lambda self: 3)])
    ours = Target.__dict__["method"]
    Target.method = lambda self: 4
    with pytest.raises(RuntimeError, match="something else replaced it"):
        ledger.uninstall()
    Target.method = ours
    ledger.uninstall()
    assert Target.__dict__["method"] is original
