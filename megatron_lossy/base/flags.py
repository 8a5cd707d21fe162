"""Flags from dataclasses: the common base of all configurations, their argparse groups, documentation and identity."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any, TypeVar

from .errors import UsageError, refuse

Config = TypeVar("Config")
Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
_FIRST_CLAUSE = re.compile(r"(?:[\w-]+(?:, [\w-]+)*: )?[^;:]*?(?=[;:]| \([a-z]|$)")


def flag(
    default: Any,
    help: str,
    *,
    basic: bool = False,
    incidental: bool = False,
    group: str | None = None,
    **argparse_options: Any,
) -> Any:
    """Return a dataclass field that is also a command-line flag ``--name-with-dashes``.

    ``argparse_options`` go to ``ArgumentParser.add_argument``; ``flag="--x"`` overrides the name. The annotation has the
    type, of which a whole number is called N; a tuple takes several values. A default of ``False`` or ``True`` makes a switch.
    ``basic``: a short help shows the flag. ``incidental``: the flag changes no weight and no loss of a run, only the files, their places
    and their times. ``group``: the heading that begins with this flag in help and documentation, and holds until the next.
    """
    options = dict(argparse_options, help=help)
    if isinstance(default, bool):
        options["action"] = "store_true"
    if isinstance(default, list):
        raise TypeError("use a tuple for a default of several values")
    return field(default=default, metadata={"flag": options, "basic": basic, "incidental": incidental, "group": group})


def incidental_fields(cls: type) -> set[str]:
    """Return the flags of ``cls`` that a resumed run may change and still be the same run."""
    return {f.name for f in dataclasses.fields(cls) if f.metadata.get("incidental")}


def identity(config: Any) -> dict[str, Any]:
    """Return the settings that identify a run. A folder with other values of them holds another run."""
    incidental = incidental_fields(type(config))
    return {name: value for name, value in dataclasses.asdict(config).items() if name not in incidental}


def difference(cls: type, saved: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return the first of :func:`differences`; or ``None``."""
    return next(differences(cls, saved, here), None)


def differences(cls: type, saved: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of ``cls`` that differ between the identities ``saved`` and ``here``, in words.

    ``saved`` may come from an earlier version, and from JSON: a flag that came later had its default.
    """
    try:
        known = identity(of_flags(cls, saved))
    except UsageError as error:
        yield f"with flags that are refused here: {error}"
        return
    for name, now in here.items():
        there = _plain(known[name])
        if there != _plain(now):
            yield f"{flag_name(cls, name)} was {there} there and is {_plain(now)} here"


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def of_flags(cls: type[Config], settings: Mapping[str, Any]) -> Config:
    """Return the dataclass ``cls`` with the values of ``settings``; tuples may be lists there, as in JSON."""
    values = {f.name: settings[f.name] for f in _flag_fields(cls) if f.name in settings}
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def flag_name(cls: Any, name: str) -> str:
    """Return the command-line name of a field of the dataclass ``cls``: ``p_grad`` gives ``--p-grad``."""
    options = cls.__dataclass_fields__[name].metadata["flag"]
    return options.get("flag", "--" + name.replace("_", "-"))


def texts_by_flag(config: Any, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return ``settings``, values of fields of ``config``, as text by their flags."""
    return {flag_name(type(config), name): as_text(value) for name, value in settings.items()}


def check_choice(config: Any, name: str) -> None:
    """Raise :class:`UsageError` unless the value of ``name``, or each of several, is among the choices of its flag."""
    choices = config.__dataclass_fields__[name].metadata["flag"]["choices"]
    values = getattr(config, name)
    for value in values if isinstance(values, tuple) else (values,):
        if value not in choices:
            raise refuse(flag_name(config, name), value, "must be one of " + ", ".join(choices))


def refuse_unused(config: Any, name: str, why: str) -> None:
    """Raise :class:`UsageError` with the reason ``why`` if the flag ``name`` was given without effect."""
    value = getattr(config, name)
    if value != config.__dataclass_fields__[name].default:
        raise refuse(flag_name(config, name), shown(value), why)


def number_or_auto(text: str) -> int | str:
    """Return a whole number, or ``auto``."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, not {text!r}") from None


def in_unit_interval(name: str, value: float) -> None:
    """Raise :class:`UsageError` unless ``value`` of the flag ``name`` is in [0, 1)."""
    if not 0 <= value < 1:  # NaN fails too
        raise refuse(name, value, "must be in [0, 1)")


def check_code(flag: str, block: int, parity: int, least: int = 1, copies: bool = False) -> None:
    """Raise :class:`UsageError` for blocks of ``block`` packets with ``parity`` of parity that no code has.

    ``copies``: there may be more parity than packets.
    """
    if not (least <= parity <= (255 if copies else min(block, 255)) and 1 <= block < 2**16):
        most = "" if copies else " <= B"
        raise refuse(flag, f"{block} {parity}", f"needs {least} <= C{most}, C at most 255 and B in [1, 65535]")


def _flag_fields(cls: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of ``cls`` itself, then the inherited ones."""
    fields = [f for f in dataclasses.fields(cls) if "flag" in f.metadata]
    inherited = {name for base in cls.__bases__ for name in getattr(base, "__dataclass_fields__", ())}
    return sorted(fields, key=lambda f: f.name in inherited)


def options_of(f: dataclasses.Field[Any]) -> dict[str, Any]:
    """Return the options of the flag ``f`` for ``ArgumentParser.add_argument``."""
    options = dict(f.metadata["flag"])
    if options.get("action") != "store_true":
        kind = re.search(r"\b(int|float)\b", str(f.type))
        options.setdefault("type", {"int": int, "float": float}[kind[0]] if kind else str)
        if "tuple[" in str(f.type):
            options.setdefault("nargs", "+")
        if options["type"] is int and "choices" not in options:
            options.setdefault("metavar", "N")
    return options


def flag_groups(cls: Any) -> dict[str, list[dataclasses.Field[Any]]]:
    """Return the flags of ``cls`` by their headings; flags before the first heading are under an empty one."""
    groups: dict[str, list[dataclasses.Field[Any]]] = {}
    heading = ""
    for f in _flag_fields(cls):
        heading = f.metadata["group"] or heading
        groups.setdefault(heading, []).append(f)
    return groups


def did_you_mean(words: Iterable[str], known: Iterable[str]) -> str:
    """Return a hint about unknown ``words``: the nearest known names; empty if none is near."""
    names = {name.lstrip("-"): name for name in known}
    close = [difflib.get_close_matches(word.partition("=")[0].lstrip("-"), names, n=1) for word in words]
    found = list(dict.fromkeys(names[near[0]] for near in close if near))
    return f", did you mean {' and '.join(found)}" if found else ""


def _with_hint(parser: argparse.ArgumentParser, refuse_as: Callable[[str], Any], message: str) -> Any:
    """Call ``refuse_as`` with ``message`` and the flags that unknown ones may be meant for."""
    head, _, unknown = message.partition("unrecognized arguments: ")
    if unknown and not head:
        message += did_you_mean(
            (word for word in unknown.split() if word.startswith("--")), parser._option_string_actions
        )
    return refuse_as(message)


def hint_at_flags(parser: argparse.ArgumentParser) -> None:
    """Make ``parser`` propose known flags for unknown ones."""
    if "error" not in vars(parser):
        parser.error = functools.partial(_with_hint, parser, parser.error)  # type: ignore[method-assign]


def add_flags(
    parser: Parser,
    cls: type,
    title: str,
    description: str | None = None,
    only: Callable[[str], bool] = lambda name: True,
    short: bool = False,
) -> Parser:
    """Add the flags of the dataclass ``cls`` to ``parser``, in groups titled ``title``. Return ``parser``.

    The defaults of the parser are those of ``cls``. ``only``: whether to add a field, by its name. ``short``: the help
    shows the first clause of basic flags, in one group, and none of the others.
    """
    hint_at_flags(parser)
    group: Any = None
    for heading, fields in flag_groups(cls).items():
        chosen = [f for f in fields if only(f.name)]
        if not chosen:
            continue
        if group is None or not short:
            group = parser.add_argument_group(f"{title}: {heading}" if heading and not short else title, description)
        for f in chosen:
            options = options_of(f)
            name = options.pop("flag", flag_name(cls, f.name))
            if short:
                options["help"] = first_clause(options["help"]) if f.metadata["basic"] else argparse.SUPPRESS
            try:
                group.add_argument(name, dest=f.name, default=f.default, **options)
            except argparse.ArgumentError:
                action: Any = parser._option_string_actions[name]
                other = action.container.title
                owner = next(c for c in reversed(cls.__mro__) if f.name in getattr(c, "__dataclass_fields__", ()))
                raise UsageError(f"{name}: {full_name(owner)} has it, and so has the group {other!r}") from None
    return parser


def full_name(cls: type) -> str:
    """Return the name of a class with its module, which no class of another package has."""
    return f"{cls.__module__}.{cls.__qualname__}"


def first_clause(help: str) -> str:
    """Return ``help`` up to its first semicolon, colon or bracket with words.

    A colon after one word, or after words between commas, ends no clause: these name what the flag goes with.
    """
    found = _FIRST_CLAUSE.match(help)
    return help if found is None else found[0]


def flag_help(cls: type, title: str, headings: Iterable[str]) -> str:
    """Return the help of the flags of ``cls`` under ``headings``, in full."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False)
    groups = flag_groups(cls)
    for heading in headings:
        names = {f.name for f in groups[heading]}
        add_flags(parser, cls, title, only=names.__contains__)
    return parser.format_help().strip()


def from_namespace(cls: type[Config], namespace: argparse.Namespace) -> Config:
    """Return the dataclass ``cls`` filled from an argparse namespace. Raise :class:`UsageError`."""
    values = {}
    for f in _flag_fields(cls):
        value = getattr(namespace, f.name, f.default)
        values[f.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def as_text(value: Any) -> str:
    """Return the value of a flag as it is written on the command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def shown(value: Any) -> str:
    """Return the value of a flag as a message shows it: a switch is on."""
    return "on" if value is True else as_text(value)


def as_flag(cls: Any, name: str, value: Any) -> str:
    """Return the command-line text that gives the field ``name`` of ``cls`` the value ``value``."""
    return flag_name(cls, name) + ("" if value is True else f" {as_text(value)}")
