"""Versions, devices and hook targets, as this process finds them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import platform
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import UsageError


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``status``: ok, absent (and not needed), warning, or problem (not ready)."""

    section: str
    name: str
    status: str
    text: str


def versions(checkout: str | None) -> list[Finding]:
    """Return findings on Python, torch, its backends, Megatron and fast packages. ``checkout``: a Megatron-LM."""
    findings = [_finding("python", "ok", platform.python_version())]
    try:
        import torch
    except ImportError as error:
        return [*findings, _finding("torch", "problem", f"cannot be imported: {error}")]
    findings += [_finding("torch", "ok", str(torch.__version__)), _fsdp2()]
    findings += [*_megatron(checkout), _optional("transformer-engine", "transformer_engine"), apex()]
    findings.append(_optional("habana-torch-plugin", "habana_frameworks.torch"))
    return [*findings, _optional("intel-transformer-engine", "intel_transformer_engine"), *_backends(torch)]


def _fsdp2() -> Finding:
    """Return whether this torch lets others make FSDP2's exchanges, for models without Megatron."""
    from ...pytorch.arguments import check_torch

    try:
        check_torch()
    except UsageError as error:
        return _finding("FSDP2", "absent", f"{error}; DDP works")
    return _finding("FSDP2", "ok", "lets others make its exchanges (megatron_lossy.pytorch.make_lossy)")


def _megatron(checkout: str | None) -> list[Finding]:
    from ...base import device
    from ...hooks import check_version

    device.prepare_import()
    try:
        with _quiet():
            core = importlib.import_module("megatron.core")
    except ImportError as error:
        return [_finding("megatron-core", "problem", f"cannot be imported: {error}")]
    where = Path(core.__file__).parent
    try:
        check_version(core.__version__)
        status, text = "ok", f"{core.__version__} in {where}"
    except UsageError as error:
        status, text = "problem", f"{error} (in {where})"
    findings = [_finding("megatron-core", status, text)]
    if checkout is None:
        text = "no checkout given (--megatron-lm PATH); enough for megatron_lossy.train"
        return [*findings, _finding("Megatron-LM", "absent", text)]
    if missing := [name for name in ("pretrain_gpt.py", "megatron/training") if not Path(checkout, name).exists()]:
        return [*findings, _finding("Megatron-LM", "problem", f"{checkout} has no {missing[0]}")]
    return [*findings, _finding("Megatron-LM", "ok", f"{_describe(checkout)} in {checkout}")]


def _describe(checkout: str) -> str:
    command = ["git", "-C", checkout, "describe", "--tags", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        done = None
    return done.stdout.strip() if done is not None and not done.returncode else "not a git checkout"


def apex() -> Finding:
    """Return NVIDIA's Apex. PyPI does not have it: the package of that name there is another one."""
    if (spec := importlib.util.find_spec("apex")) is None or not spec.submodule_search_locations:
        text = "not installed; Megatron then uses torch's or Transformer Engine's kernels"
        return _finding("NVIDIA Apex", "absent", text)
    where = Path(next(iter(spec.submodule_search_locations)))
    if not (where / "multi_tensor_apply").is_dir():
        text = f"{where} is not NVIDIA's but PyPI's apex, which has nothing to do with it: pip uninstall apex"
        return _finding("NVIDIA Apex", "warning", text)
    if importlib.util.find_spec("amp_C") is None:
        return _finding("NVIDIA Apex", "warning", f"{where} was built without its CUDA extensions (amp_C)")
    return _finding("NVIDIA Apex", "ok", f"{_version('apex')} in {where}")


def _optional(name: str, module: str) -> Finding:
    try:
        absent = importlib.util.find_spec(module) is None
    except ImportError:  # of a parent package
        absent = True
    if absent:
        return _finding(name, "absent", "not installed")
    try:
        with _quiet():
            importlib.import_module(module)
    except Exception as error:
        return _finding(name, "warning", f"is installed, but cannot be imported: {' '.join(str(error).split())[:200]}")
    return _finding(name, "ok", _version(name))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _backends(torch: Any) -> list[Finding]:
    distributed = torch.distributed
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if distributed.is_nccl_available() else None
    hccl = "registered" if "hccl" in distributed.Backend.backend_list else None
    found = {"NCCL": nccl, "HCCL": hccl, "gloo": "available" if distributed.is_gloo_available() else None}.items()
    return [_finding(name, "ok" if text else "absent", text or "not available") for name, text in found]


def devices() -> tuple[str, int, list[Finding]]:
    """Return kind and number of accelerators (cpu, 0 without any), and a finding per device."""
    try:
        import torch

        from ...base import device
    except ImportError:
        return "cpu", 0, []
    if (kind := device.device_type()) == "cpu":
        from ..environment import processor

        return kind, 0, [Finding("devices", "cpu", "ok", f"{processor()}; no accelerator")]
    accelerators = getattr(torch, kind)
    found = []
    for index in range(accelerators.device_count()):
        text = accelerators.get_device_name(index)
        if kind == "cuda":
            text += f", {accelerators.get_device_properties(index).total_memory / 2**30:.1f} GiB"
        found.append(Finding("devices", f"{kind}:{index}", "ok", text))
    return kind, len(found), found


def hook_targets(training: bool) -> list[Finding]:
    """Return findings on the fit of the hooks to this Megatron: targets exist and take the parameters that hooks use.

    ``training``: also those of megatron.training.
    """
    from ...base import device
    from ...hooks.versions import how_to_import

    if training:
        device.prepare_import()
        try:
            with _quiet():
                importlib.import_module("megatron.training")
        except ImportError as error:
            text = f"cannot be imported: {error}; {how_to_import(error)}"
            return [Finding("hooks", "megatron.training", "problem", text)]
    try:
        with _quiet():
            device.prepare(megatron_training=training)
            checks = check_patches()
    except Exception as error:
        return [Finding("hooks", "megatron", "problem", f"cannot be examined: {' '.join(str(error).split())[:300]}")]
    findings = []
    for module in ("megatron.core", "megatron.training"):
        own = [check for check in checks if check.target.startswith(module)]
        found = sum(check.found for check in own)
        absent = f"; {len(own) - found} are not in this version, which needs none" if found < len(own) else ""
        if own:
            findings.append(Finding("hooks", module, "ok", f"{found} attributes would be replaced{absent}"))
    wrong = [(check.target.partition(":")[2], check.problem) for check in checks if check.problem]
    return findings + [Finding("hooks", name, "problem", problem) for name, problem in wrong]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Return a context without Megatron's warnings at import about every missing package."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _finding(name: str, status: str, text: str) -> Finding:
    return Finding("versions", name, status, text)


def check_patches() -> list[Any]:
    """Check whether the patches of a lossy run fit the installed Megatron; applies none of them.

    Includes those of ``megatron.training`` if it can be imported. Raise ``ImportError`` without megatron-core.
    """
    import megatron.core

    from ...base.ledger import check
    from ...config import LossyConfig
    from ...hooks import Lossy, megatron_core

    lossy = Lossy(LossyConfig(eval_weights="both", p_act=0.1))  # these flags need more patches
    patches = megatron_core.patches(lossy)
    with contextlib.suppress(ImportError):
        import megatron.training.training  # noqa: F401

        from ...hooks import megatron_training

        patches += megatron_training.flag_patches() + megatron_training.patches(lossy)
    return [check(patch) for patch in patches]
