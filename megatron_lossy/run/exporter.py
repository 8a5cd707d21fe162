"""The last values of a run, for Prometheus (``--metrics-port``, docs/metrics.md). Needs ``prometheus_client``."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

PREFIX = "megatron_lossy_"
#: Names that differ in a record of validation, as its values do.
_VALIDATION = {"lm loss": "validation loss"}


def prometheus_name(name: str) -> str:
    """Return the name in Prometheus of a value that records call ``name``: ``megatron_lossy_loss_rate_grad``."""
    return PREFIX + re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


class Exporter:
    """Serves gauges at a port, on a thread. It is a writer of records, as ``lab/train/metrics.py`` has others."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._registry, self._gauges = CollectorRegistry(), dict[str, Any]()
        self._server, _ = start_http_server(port, registry=self._registry)

    def write(self, record: Mapping[str, Any]) -> None:
        """Take over the numbers of a record of training or validation."""
        kind = record.get("kind", "train")
        if kind not in ("train", "valid"):
            return
        for name, value in record.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if kind == "train":
                self._gauge(name).set(value)
            elif name in _VALIDATION:
                self._gauge(_VALIDATION[name], ("weights",)).labels(record["weights"]).set(value)

    def _gauge(self, name: str, labels: tuple[str, ...] = ()) -> Any:
        from prometheus_client import Gauge

        key = prometheus_name(name)
        if key not in self._gauges:
            self._gauges[key] = Gauge(key, name, labels, registry=self._registry)
        return self._gauges[key]

    def close(self) -> None:
        """Serve no longer."""
        self._server.shutdown()
        self._server.server_close()


def exporter_at(port: int) -> Exporter | None:
    """Return an exporter at ``port``. If that is taken, a line of the log says so, and there is none."""
    try:
        return Exporter(port)
    except OSError as error:
        logger.warning("--metrics-port %d: %s; the run goes on without it", port, error.strerror)
    return None
