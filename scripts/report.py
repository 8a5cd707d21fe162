"""Make docs/report/report.pdf of docs/report/report.typ: ``make report``. The same version of typst makes the same bytes."""

from __future__ import annotations

import typst

from scripts.site import ROOT

SOURCE = ROOT / "docs" / "report" / "report.typ"
REPORT = SOURCE.with_suffix(".pdf")


def made() -> bytes:
    """Return the report as PDF."""
    return typst.compile(SOURCE, root=ROOT)


if __name__ == "__main__":
    REPORT.write_bytes(made())
