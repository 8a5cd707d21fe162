"""The ledger of everything we change in somebody else's module.

One :class:`Patch` per changed attribute says what is replaced, why, for which versions of megatron-core and
when the patch can go. Installing is all or nothing; uninstalling refuses to remove somebody else's later patch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MISSING = object()


@dataclass(frozen=True)
class Patch:
    """One attribute that we replace.

    ``target`` is ``module:attribute.path``; ``replacement`` is called with the original (``None`` if absent and
    ``create``) and returns the new value. ``optional`` skips a target that this version does not have.
    """

    target: str
    replacement: Callable[[Any], Any]
    why: str
    versions: str
    until: str
    optional: bool = False
    create: bool = False


class Ledger:
    """The patches of one subsystem, and which of them are in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._installed: list[tuple[Patch, Any, str, Any, Any]] = []

    @property
    def installed(self) -> bool:
        """True between :meth:`install` and :meth:`uninstall`."""
        return bool(self._installed)

    def install(self, patches: list[Patch]) -> None:
        """Apply all of ``patches`` or none. Raises ``RuntimeError`` naming a target that does not exist."""
        if self._installed:
            raise RuntimeError(f"{self.name} patches are already installed")
        resolved = []
        for patch in patches:
            found = _resolve(patch)
            if found is not None:
                resolved.append((patch, *found))
        try:
            for patch, owner, attribute, original in resolved:
                new = patch.replacement(None if original is _MISSING else original)
                setattr(owner, attribute, new)
                self._installed.append((patch, owner, attribute, original, _get(owner, attribute)))
        except BaseException:
            self._restore()
            raise

    def uninstall(self) -> None:
        """Put every original back. Raises ``RuntimeError``, changing nothing, if a target was patched again since."""
        for patch, owner, attribute, _, new in self._installed:
            if _get(owner, attribute) is not new:
                raise RuntimeError(
                    f"cannot remove the patch of {patch.target}: something else replaced it after us; remove that first"
                )
        self._restore()

    def _restore(self) -> None:
        for _, owner, attribute, original, _ in reversed(self._installed):
            if original is _MISSING:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)
        self._installed.clear()

    def report(self) -> str:
        """What is patched and why, one line each."""
        lines = [f"{self.name}: {len(self._installed)} attributes replaced"]
        for patch, *_ in self._installed:
            lines.append(f"  {patch.target}  ({patch.versions}; until {patch.until}): {patch.why}")
        return "\n".join(lines)


def _get(owner: Any, attribute: str) -> Any:
    """The attribute as stored, so that a class keeps its static and class methods as they are."""
    if isinstance(owner, type):
        return vars(owner).get(attribute, _MISSING)
    return getattr(owner, attribute, _MISSING)


def _resolve(patch: Patch) -> tuple[Any, str, Any] | None:
    module_name, _, path = patch.target.partition(":")
    *parents, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
    except (ImportError, AttributeError) as error:
        if patch.optional:
            return None
        raise RuntimeError(f"cannot patch {patch.target}, needed because {patch.why}: {error}") from error
    original = _get(owner, attribute)
    if original is _MISSING and not patch.create:
        if patch.optional:
            return None
        raise RuntimeError(f"cannot patch {patch.target}, needed because {patch.why}: no such attribute")
    return owner, attribute, original
