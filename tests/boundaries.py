"""Expected losses of stage boundaries, from the draws and the plain reference of the code; recorded losses."""

from fractions import Fraction

import numpy as np

from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.channel.draws import Uniforms
from tests.reference import boundary_residual, boundary_units


def boundary_lost(config, phase, boundary, rank, tensor, step, micro_batch, packets, earlier=None):
    """bool[packets]: what is lost for good of a message. ``earlier``: packets of those before it; default as many in each."""
    recovers = config.act_fec != ("off",)
    *kinds, depth = config.act_fec if recovers else ("1,1,0", "1,1,0", "0")
    high = Fraction(boundary.layer, boundary.layers) <= Fraction(depth)
    block, parity, bound = kinds[not high].split(",")
    earlier = [packets] * micro_batch if earlier is None else earlier
    units, *others = (boundary_units(one, int(block), int(parity)) if recovers else one for one in (packets, *earlier))
    first = sum(others)
    stream = Stream("boundary", rank, boundary.stage, boundary.chunk)
    links = np.array([tensor])
    draws = Uniforms(config.loss_seed, 0, Exchange(phase, stream, step), links, links, first + units)
    lost = draws.below({"act": config.p_act, "act-grad": config.p_act_grad}[phase])[0, first:]
    if not recovers:
        return lost
    residual = boundary_residual(packets, int(block), int(parity), lost)
    return residual & (int(residual.sum()) <= Fraction(bound) * packets)


def event_rows(path):
    """The rows of one file of events, or of all in a folder."""
    import pyarrow.parquet as pq

    files = sorted(path.glob("_events_*.parquet")) if path.is_dir() else [path]
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


def boundary_rows(folder):
    """The rows of all ranks about messages, by iteration, phase, stream and message."""
    rows = [row for row in event_rows(folder) if row["kind"] in ("act", "act-grad")]
    return sorted(rows, key=lambda row: (row["iteration"], row["kind"], row["stream"], row["message"]))
