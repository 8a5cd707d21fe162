"""All checks of a run that is about to start: the table of refusals, and the files that loss flags name."""

from __future__ import annotations

import logging

from ..base.errors import check_package
from ..config import PHASES, LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..transport import check_channels, check_network

logger = logging.getLogger(__name__)


def warn_of_instances(config: LossyConfig, instances: int) -> None:
    """Warn that exchanges between several optimizer ``instances`` lose nothing, if those inside them do."""
    if instances > 1 and not all(config.untouched(phase) for phase in PHASES):
        logger.warning(
            "--num-distributed-optimizer-instances %d: the exchange between instances stays reliable; --sites M makes the one "
            "between sites lossy",
            instances,
        )


def check_run(config: LossyConfig, facts: Facts) -> None:
    """Raise :class:`UsageError` for loss flags that a run with ``facts`` cannot have. Needs no process group.

    ``facts`` must have the number of workers. Files come after the table, since they may be large or on other machines.
    """
    assert facts.workers is not None, "how many ranks there are is known where a run starts"
    check_refusals(config, facts)
    if config.errs and facts.workers == 1:
        logger.warning("--grad-error with one data-parallel rank: nothing is reduced, so that no error happens")
    warn_of_instances(config, facts.optimizer_instances or 1)
    if config.sites is not None and facts.timing_level:
        logger.warning(
            "--timing-log-level %d: its barriers cross between sites several times an iteration; 0 has none",
            facts.timing_level,
        )
    if config.metrics_port is not None:
        check_package("prometheus_client", "--metrics-port", config.metrics_port, "'megatron-lossy[ops]'")
    check_network(config)
    config.jobs().check(facts.train_iters)
    check_channels(config, facts.workers, facts.train_iters)
