"""The observers of a run."""

from __future__ import annotations

from typing import Any

from ..base.registry import MECHANISMS
from ..delivery_log.events import EventLog
from ..delivery_log.kinds import all_kinds
from ..delivery_log.writer import DeliveryLog
from .monitor import Drift, ExchangeMonitor, Observer


def make_observers(run: Any, writer: int | None = None) -> list[Observer]:
    """The observers that the flags of ``run`` ask for; none if they are inert. ``writer``: see :class:`Run`."""
    config = run.config
    if config.inert:
        return []
    observers: list[Observer] = [] if config.lossless else [ExchangeMonitor(config)]
    if config.observed:
        from ..transport.monitor import DatagramMonitor, StreamMonitor

        kind = DatagramMonitor if config.transport == "udp" else StreamMonitor
        observers.append(kind(lambda: run.carriers, writer))
    if config.drift_interval and not (config.lossless or config.needs_whole_optimizers()):
        observers.append(Drift(config))
    logs = config.delivery_log is not None and not config.jobs().apart  # else jobs have no exchanges in common
    if logs and not config.lossless:
        observers.append(DeliveryLog(config, writer))
    if logs and any(kinds(config).happen() for kinds in all_kinds()):
        observers.append(EventLog(config, writer))
    return observers + [one for mechanism in MECHANISMS.all() for one in mechanism.observers(run, writer)]
