"""The dashboard for Grafana: ``python -m tests.dashboard`` writes configs/ops/grafana.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_lossy.base.files import write_text
from megatron_lossy.run.exporter import prometheus_name

FILE = Path(__file__).parent.parent / "configs/ops/grafana.json"
#: Title, unit as Grafana names it, and the metrics of a panel.
PANELS = (
    ("Training loss", "short", ("lm loss",)),
    ("Validation loss", "short", ("validation loss",)),
    ("Seconds per iteration", "s", ("seconds",)),
    ("Iteration", "short", ("iteration",)),
    (
        "Units lost",
        "percentunit",
        ("loss rate grad", "loss rate param", "loss rate sync-reduce", "loss rate sync-gather"),
    ),
    ("Ages of stale units (updates)", "short", ("stale age mean", "stale age max")),
    ("Distance of replicas over their length", "percentunit", ("drift over weight", "replica divergence")),
    ("Islands in an exchange", "short", ("island members", "island senders")),
    ("Waiting for other islands", "s", ("sync wait",)),
    ("Datagrams, of a record", "short", ("udp sent", "udp units lost", "udp late", "udp overflow", "udp refused")),
    ("Gradient norm", "short", ("grad norm",)),
    ("Skipped iterations, of a record", "short", ("skipped",)),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it: one source of data, and a run by its job and instance."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": source,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
            "targets": [
                {
                    "refId": chr(ord("A") + place),
                    "datasource": source,
                    "expr": f'{prometheus_name(name)}{{job=~"$job"}}',
                    "legendFormat": f"{name} {{{{instance}}}} {{{{weights}}}}",
                }
                for place, name in enumerate(names)
            ],
        }
        for number, (title, unit, names) in enumerate(PANELS)
    ]
    jobs = f"label_values({prometheus_name('iteration')}, job)"
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        {"name": "job", "type": "query", "datasource": source, "query": jobs, "includeAll": True, "multi": True},
    ]
    return {
        "uid": "megatron-lossy",
        "title": "megatron-lossy",
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def text() -> str:
    """Return the content of the file."""
    return json.dumps(dashboard(), separators=(",", ":")).replace('{"id":', '\n{"id":') + "\n"


if __name__ == "__main__":
    write_text(FILE, text())
    print(f"wrote {FILE}")
