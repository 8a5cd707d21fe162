"""What stage boundaries must lose, from the draws and the plain reference of the code."""

from fractions import Fraction

import numpy as np

from megatron_lossy.channel.draws import Uniforms
from megatron_lossy.exchange import Exchange, Stream
from tests.reference import boundary_residual, boundary_units


def boundary_lost(config, phase, boundary, rank, tensor, step, micro_batch, packets):
    """bool[packets]: what is lost for good of a message, all of a boundary's being equally long."""
    high = Fraction(boundary.layer, boundary.layers) <= Fraction(str(config.act_high_depth))
    block, parity = config.act_fec_high if high else config.act_fec_low
    bound = config.act_residual_high if high else config.act_residual_low
    recovers = config.act_retransmit == "on"
    units = boundary_units(packets, block, parity) if recovers else packets
    stream = Stream("boundary", rank, boundary.stage, boundary.chunk)
    links = np.array([tensor])
    draws = Uniforms(config.loss_seed, 0, Exchange(phase, stream, step), links, links, (micro_batch + 1) * units)
    lost = draws.below({"act": config.p_act, "act-grad": config.p_act_grad}[phase])[0, micro_batch * units :]
    if not recovers:
        return lost
    residual = boundary_residual(packets, block, parity, lost)
    return residual & (int(residual.sum()) <= Fraction(str(bound)) * packets)
