"""One rank of a row on a real device: ``torchrun … -m megatron_lossy.lab.calibration ROW FOLDER``; ``doctor --calibrate`` starts it.

``ROW`` may end in ``/unhooked``. Rank 0 writes ``result.json`` into ``FOLDER``, which has the data: loss and counts.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from .job import run
from .rows import rows
from .trace import counted


def main(name: str, folder: Path) -> None:
    """Run the row on this rank."""
    from torch.profiler import profile, supported_activities

    row = rows()[name.removesuffix("/unhooked")]
    row = row.unhooked if name.endswith("/unhooked") else row
    data = {key: (str(folder / key),) for key in ("data_path", "valid_data_path")}
    profiler = profile(activities=supported_activities())  # a pretended device has no counts
    values = run(row, data, profiler.start, profiler.stop)
    trace = folder / f"trace-{os.environ['RANK']}.json"
    profiler.export_chrome_trace(str(trace))
    if values.loss is not None:  # one of the last stage; the writers of data-parallel ranks have the same loss
        measured = asdict(counted(json.loads(trace.read_text())["traceEvents"]))
        aside = folder / f"result-{os.environ['RANK']}.json"
        aside.write_text(json.dumps({"loss": values.loss, "measured": measured}))
        aside.replace(folder / "result.json")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
