"""An extension of griffe for the API reference: cross-references of Sphinx become code."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":\w+:`[.~!]*([^`]+)`")


class Roles(griffe.Extension):
    """Replace ``:func:`.name``` by ```name``` in each docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the roles of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
