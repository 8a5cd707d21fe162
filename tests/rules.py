"""What rules of recovery are handed by a wire, where there is none."""

from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.mechanisms.priority.choosing import Priority, Protection
from megatron_lossy.mechanisms.priority.protected import Required, Spared
from megatron_lossy.recovery import Gradients

NONE = Protection()


def gradients(step=0, buffer=None, output=None, loss_scale=None, **options):
    """The record of an exchange of gradients in ``step``, whose buffers a test hands over by itself."""
    return Gradients(
        Exchange("grad", Stream(), step), 0, buffer, output, None, loss_scale=lambda: loss_scale, **options
    )


def spared(rule, protection=NONE):
    """``rule``, whose sender spares from drawn losses what ``protection`` says."""
    return Spared(rule, Priority(protection, rule.units, rule.rank))


def required(rule, protection=NONE):
    """``rule``, whose sender tells the network which units must arrive."""
    return Required(rule, Priority(protection, rule.units, rule.rank))


def send(rule, buffer, delivery, x=None):
    """Let ``rule`` change ``buffer`` as a sender does over a collective; returns what the owner's verb is given."""
    x = gradients(delivery.exchange.step) if x is None else x
    return rule.before(buffer, delivery.lost_there(rule.units), delivery, x)
