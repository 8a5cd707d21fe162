"""The ledger of all changes in other packages' modules.

One :class:`Patch` per changed attribute names the target and the reason. Installing checks that all targets exist and
take the parameters that replacements rely on; it applies all patches or none. Uninstalling refuses to remove another package's later patch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import UsageError

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Signature:
    """The parameters that a replacement relies on.

    ``first``: the leading positional ones by name, with ``|`` between the names that versions give to the same one;
    ``named``: others that must exist; ``others``: more that may exist, ``None`` for any.
    """

    first: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    others: tuple[str, ...] | None = None

    def __str__(self) -> str:
        parts = [*self.first, *(f"{name}=" for name in self.named)]
        parts += ["..."] if self.others is None else [f"[{name}=]" for name in self.others]
        return f"({', '.join(parts)})"

    def fits(self, function: Callable) -> bool:
        """Return whether ``function`` takes these parameters. Wrappers with any parameters fit."""
        signature = _signature(function)
        if signature is None:
            return False
        parameters = signature.parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        if inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds:
            return True
        positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        names = [parameter.name for parameter in parameters]
        if len(positional) < len(self.first):
            return False
        if any(found not in wanted.split("|") for found, wanted in zip(positional, self.first)):
            return False
        rest = set(names) - set(positional[: len(self.first)])
        return rest.issuperset(self.named) and (self.others is None or rest <= set(self.named) | set(self.others))


def _signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One attribute that we replace, and why.

    ``target`` is ``module:attribute.path``. Exactly one of three arguments gives its new value. ``around`` is a plain
    function that is called in its place with the original (``None`` if absent and ``create``) before the arguments.
    ``value`` is a function without arguments that returns the new value. ``make`` is a function that makes the new
    value from the original. ``why``: the reason. ``takes``: the parts of the original's signature that it relies on.
    ``optional`` skips a target that this version does not have.
    """

    target: str
    why: str
    around: Callable[..., Any] | None = None
    value: Callable[[], Any] | None = None
    make: Callable[[Any], Any] | None = None
    optional: bool = False
    create: bool = False
    takes: Signature | None = None

    def __post_init__(self) -> None:
        assert sum(kind is not None for kind in (self.around, self.value, self.make)) == 1, self.target

    def replacement(self, original: Any) -> Any:
        """Return the new value of the attribute."""
        if self.value is not None:
            return self.value()
        if self.make is not None:
            return self.make(original)
        function = original.__func__ if isinstance(original, staticmethod) else original
        replaced = functools.partial(self.around, function)
        if "." in self.target.partition(":")[2] and function is original:
            replaced = _method(replaced)
        if original is not None:
            functools.update_wrapper(replaced, function)
        return replaced if function is original else staticmethod(replaced)


def _method(function: Callable[..., Any]) -> Any:
    """Return ``function`` as an attribute of a class that binds its object, as a partial function does not."""
    return lambda *args, **kwargs: function(*args, **kwargs)


class Check(NamedTuple):
    """The fit of a patch: whether its ``target`` was found, and one line about a ``problem``, empty if there is none."""

    target: str
    found: bool
    problem: str


class Ledger:
    """The patches of one subsystem, and whether each is in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._installed: list[tuple[Patch, Any, str, Any, Any]] = []

    @property
    def installed(self) -> bool:
        """Whether this is between :meth:`install` and :meth:`uninstall`."""
        return bool(self._installed)

    def install(self, patches: list[Patch]) -> None:
        """Apply all of ``patches`` or none.

        Raise :class:`UsageError` naming a target that does not exist or has an unexpected signature.
        """
        if self._installed:
            raise RuntimeError(f"{self.name} patches are already installed")
        resolved = []
        for patch in patches:
            _, found, problem = check(patch)
            if problem:
                raise UsageError(problem)
            if found or patch.create:
                resolved.append((patch, *_resolve(patch)))
        try:
            for patch, owner, attribute, original in resolved:
                new = patch.replacement(None if original is _MISSING else original)
                setattr(owner, attribute, new)
                self._installed.append((patch, owner, attribute, original, _get(owner, attribute)))
        except BaseException:
            self._restore()
            raise

    def uninstall(self) -> None:
        """Put every original back. Raise ``RuntimeError``, changing nothing, if a target was patched again since.

        Megatron may have bound a target anew to another of our replacements. Then the original of that one is put back.
        """
        ours = [new for *_, new in self._installed]
        for patch, owner, attribute, *_ in self._installed:
            if not any(_get(owner, attribute) is new for new in ours):
                raise RuntimeError(
                    f"cannot remove the patch of {patch.target}: something else replaced it after us; remove that first"
                )
        self._restore()

    def _restore(self) -> None:
        replaced = {id(new): original for *_, original, new in self._installed}
        for _, owner, attribute, original, new in reversed(self._installed):
            now = _get(owner, attribute)
            original = original if now is new else replaced.get(id(now), original)
            if original is _MISSING:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, original)
        self._installed.clear()


@contextlib.contextmanager
def patched(name: str, *patches: Patch) -> Iterator[None]:
    """Return a context in which ``patches`` of the subsystem ``name`` are applied."""
    ledger = Ledger(name)
    ledger.install(list(patches))
    try:
        yield
    finally:
        ledger.uninstall()


def _get(owner: Any, attribute: str) -> Any:
    """Return the attribute as stored, so that a class keeps its static and class methods as they are."""
    if isinstance(owner, type):
        return vars(owner).get(attribute, _MISSING)
    return getattr(owner, attribute, _MISSING)


def check(patch: Patch) -> Check:
    """Return the fit of ``patch``, without applying it. Imports the module of its target."""
    found, problem = True, ""
    try:
        owner, attribute, original = _resolve(patch)
    except (ImportError, AttributeError) as error:
        found, problem = False, "" if patch.optional else str(error)
    else:
        found = original is not _MISSING
        if not found and not patch.create and not patch.optional:
            problem = "no such attribute"
        if found and patch.takes is not None and not patch.takes.fits(getattr(owner, attribute)):
            problem = f"it takes {_signature(getattr(owner, attribute)) or 'unknown parameters'}, not {patch.takes}"
    if problem:
        problem = f"cannot patch {patch.target} of {_megatron()}: {problem} (patched because: {patch.why})"
    return Check(patch.target, found, problem)


def _megatron() -> str:
    version = getattr(sys.modules.get("megatron.core"), "__version__", None)
    return f"megatron-core {version}" if version else "this environment"


def _resolve(patch: Patch) -> tuple[Any, str, Any]:
    """Return owner, attribute and original, ``_MISSING`` if absent. Raise the errors of importing and looking up."""
    module_name, _, path = patch.target.partition(":")
    *parents, attribute = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, attribute, _get(owner, attribute)
