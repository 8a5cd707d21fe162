"""Changes that ``pip install`` of this package would make in this environment, from its own requirements."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from .found import Finding

_DISTRIBUTION = "megatron-lossy"
#: Modules whose names differ from those of their distributions.
_MODULES = {"megatron-core": "megatron.core", "pyyaml": "yaml"}
_ADVICE = "to keep what is here: pip install --no-deps (docs/install.md)"


def requirements() -> list[Requirement] | None:
    """The requirements of this package, without extras; ``None`` if they cannot be found."""
    lines = _of_checkout()
    if lines is None:
        try:
            lines = importlib.metadata.requires(_DISTRIBUTION) or []
        except importlib.metadata.PackageNotFoundError:
            return None
    parsed = map(Requirement, lines)
    return [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]


def _of_checkout() -> list[str] | None:
    """The requirements of this checkout, if it is one. It may not be installed, or have changed since."""
    project = Path(__file__).parents[3] / "pyproject.toml"
    try:
        import tomllib  # from Python 3.11 on

        return tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    except (ImportError, OSError):
        return None


def examine_requirements(wanted: Iterable[Requirement] | None) -> list[Finding]:
    """A finding per requirement that ``pip install`` would act on; a single finding if there is none."""
    if wanted is None:
        return [_finding("absent", "not known: neither the package's metadata nor its pyproject.toml is here")]
    findings = [finding for requirement in wanted if (finding := _examine(requirement)) is not None]
    return findings or [_finding("ok", "would replace and add nothing")]


def _examine(wanted: Requirement) -> Finding | None:
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        where = _on_the_path(_MODULES.get(wanted.name, wanted.name))
        if where is None:
            return _finding("warning", f"{wanted.name} is not installed; needed: {wanted}")
        return _finding("warning", f"would add {wanted.name}, which is on the path only ({where}); {_ADVICE}")
    # This follows pip: an installed release candidate is enough, although pip would not choose one.
    if _fits(version, wanted):
        return None
    return _finding("warning", f"would replace {wanted.name} {version} by {wanted}; {_ADVICE}")


def _fits(version: str, wanted: Requirement) -> bool:
    try:
        return wanted.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _on_the_path(module: str) -> str | None:
    """The file or folder that ``module`` would be imported from."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # of a parent package
        return None
    if spec is None:
        return None
    return spec.origin or next(iter(spec.submodule_search_locations or ()), None)


def _finding(status: str, text: str) -> Finding:
    return Finding("versions", "pip install", status, text)
