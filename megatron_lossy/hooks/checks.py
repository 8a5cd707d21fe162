"""All checks of a run that is about to start: the table of refusals, and the files that loss flags name."""

from __future__ import annotations

from ..channel.corruption import warn_of_one_rank
from ..config import LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..delivery_log.events import recorded_events
from ..transport import check_channels, check_network


def check_run(config: LossyConfig, facts: Facts) -> None:
    """Raise :class:`UsageError` for loss flags that a run with ``facts`` cannot have. Needs no process group.

    ``facts`` must know the number of workers. Files come after the table, since they may be large or on other machines.
    """
    assert facts.workers is not None, "how many ranks there are is known where a run starts"
    check_refusals(config, facts)
    warn_of_one_rank(config, facts.workers)
    check_network(config)
    recorded_events(config)  # whether they can be read
    config.jobs().check(facts.train_iters)
    check_channels(config, facts.workers, facts.train_iters)
