"""All problems of a run, reported at once: a line each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import UsageError


class Problems(UsageError):
    """Several wrong inputs. A reader that does not look at ``found`` sees the first."""

    def __init__(self, found: list[UsageError]) -> None:
        super().__init__(str(found[0]))
        self.found = found


class Collector:
    """Gathers errors of checks that do not depend on each other."""

    def __init__(self) -> None:
        self.found: list[UsageError] = []

    def note(self, error: UsageError) -> None:
        """Add ``error``, or all errors that it contains."""
        known = {str(one) for one in self.found}
        more = error.found if isinstance(error, Problems) else [error]
        self.found += [one for one in more if str(one) not in known]

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note a :class:`UsageError` from inside the context, and go on after it."""
        try:
            yield
        except UsageError as error:
            self.note(error)

    def finish(self) -> None:
        """Raise the errors, if there are any."""
        if len(self.found) > 1:
            raise Problems(self.found) from None
        if self.found:
            raise self.found[0] from None
