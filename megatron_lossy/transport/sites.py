"""An exchange in two levels (``--sites``): reliable inside a site, and lossy between sites. See docs/sites.md.

A site is a block of consecutive ranks, and a worker of all formulas: its gradient is the sum over its ranks, and all of
them hold the same replica. Each rank of a site exchanges its part of the shards with the ranks of the same place in the
other sites.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache, partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..base.device import all_gather_single, reduce_scatter_single
from ..base.errors import refuse
from ..base.exchange import Stream
from ..base.fetch import aside
from ..base.ledger import Ledger, Patch, Signature
from ..config import LossyConfig
from ..recovery import Gradients
from ..recovery.base import Collective
from ..recovery.rows import used_here
from .base import Networks, Transfer, Wire
from .choice import BucketSpec, wire_for
from .group import LossyGroup
from .pieces import PieceWire


def check_blocks(ranks: Sequence[int], sites: int, world: int) -> None:
    """Raise :class:`UsageError` unless as many of ``ranks``, of a data-parallel group, are in each site, site by site.

    A site is a block of ``world / sites`` global ranks.
    """
    size, rest = divmod(world, sites)
    even = [site for site in range(sites) for _ in range(len(ranks) // sites)]
    if rest or [rank // size for rank in ranks] != even:
        raise refuse(
            "--sites",
            sites,
            f"each data-parallel group must have equally many ranks in each block of {world} / {sites} ranks, in their order; "
            f"ranks {', '.join(map(str, ranks))} are a group (with pipeline stages give --use-tp-pp-dp-mapping)",
        )


@dataclass(frozen=True)
class Site:
    """This rank's place in a group of data-parallel ranks, in two levels.

    ``number``: of the site, of ``sites``. ``ranks``: the number of those of a site. ``place``: of this rank among them.
    ``inside``: the ranks of this site. ``between``: the ranks of this place, one of each site.
    """

    sites: int
    number: int
    ranks: int
    place: int
    inside: dist.ProcessGroup
    between: dist.ProcessGroup

    def stream(self, stream: Stream) -> Stream:
        """Return ``stream`` of the ranks of this place, whose losses are their own."""
        return replace(stream, expert_rank=stream.expert_rank * self.ranks + self.place)


class Sites:
    """This rank's places in the sites, ``number`` if there are any. Each has process groups of its own."""

    def __init__(self, number: int | None) -> None:
        self._number = number
        self._found: dict[tuple[int, ...], Site | None] = {}

    def open(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Make the process groups of both levels of ``groups``, which this rank is in. A collective call of all ranks.

        Raise :class:`UsageError` if sites cut one of them unevenly.
        """
        if self._number is None:
            return
        world = dist.get_world_size()
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, [tuple(dist.get_process_group_ranks(group)) for group in groups])
        for ranks in sorted({ranks for groups in everywhere for ranks in groups} - self._found.keys()):
            check_blocks(ranks, self._number, world)
            self._found[ranks] = self._made(ranks, self._number)

    @staticmethod
    def _made(ranks: tuple[int, ...], sites: int) -> Site | None:
        each = len(ranks) // sites
        if each == 1:
            return None
        # All ranks make all groups: torch names groups by their number in the process.
        inside = [dist.new_group(ranks[site * each : (site + 1) * each]) for site in range(sites)]
        between = [dist.new_group(ranks[place::each]) for place in range(each)]
        if dist.get_rank() not in ranks:
            return None
        number, place = divmod(ranks.index(dist.get_rank()), each)
        return Site(sites, number, each, place, inside[number], between[place])

    def of(self, group: dist.ProcessGroup | None) -> Site | None:
        """Return the place in ``group``; ``None`` if it was not opened, or each of its ranks exchanges for itself."""
        return self._found.get(tuple(dist.get_process_group_ranks(group or dist.group.WORLD)))


class Scalars:
    """Small all-reduces over ranks of several sites: inside each site, and then between the ranks of one place.

    ``sites``: of no exchange, in whose groups the collectives of several threads would mix.
    """

    def __init__(self, *sites: Sites) -> None:
        self._sites = list(sites)
        self._ledger = Ledger("sums between sites")

    def add(self, sites: Sites) -> None:
        """Make the sums over the groups of ``sites`` in two levels, everywhere in this process."""
        self._sites.append(sites)
        if not self._ledger.installed:
            self._ledger.install([self.patch("torch.distributed:all_reduce"), self.patch(_FUNCTIONAL)])

    def remove(self, sites: Sites) -> None:
        self._sites = [others for others in self._sites if others is not sites]
        if not self._sites:
            self._ledger.uninstall()

    def patch(self, target: str) -> Patch:
        """Put this class in the place of ``target``, an all-reduce in place or :data:`_FUNCTIONAL`."""
        functional = target == _FUNCTIONAL
        return Patch(
            target=target,
            around=self.functional if functional else self.all_reduce,
            why="norms, losses and flags cross between sites once, and not as often as a ring of all ranks does",
            optional=functional,
            takes=Signature(("self", "reduceOp", "group") if functional else ("tensor", "op", "group", "async_op")),
        )

    def all_reduce(
        self,
        original: Callable[..., Any],
        tensor: torch.Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        place = self._place(tensor, op, group)
        if place is None:
            return original(tensor, op=op, group=group, async_op=async_op)
        work = original(tensor, op=op, group=place.inside, async_op=True)
        transfer = later([work], partial(_between, place, tensor, op), tensor)
        if async_op:
            return transfer
        transfer.wait()
        return None

    def functional(
        self, original: Callable[..., Any], tensor: torch.Tensor, reduceOp: str, group: Any, tag: str = ""
    ) -> torch.Tensor:
        """Wrap the all-reduce that returns another tensor, of which DTensor makes norms."""
        op, whole = getattr(dist.ReduceOp, reduceOp.upper()), group
        if isinstance(group, tuple):
            mesh, dimension = group
            whole = mesh.get_group(dimension)
        traced = torch.compiler.is_compiling() or tensor.requires_grad or not isinstance(whole, dist.ProcessGroup)
        if traced or self._place(tensor, op, whole) is None:
            return original(tensor, reduceOp, group, tag)
        result = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, op=op, group=whole)
        return result

    def _place(self, tensor: torch.Tensor, op: Any, group: dist.ProcessGroup | None) -> Site | None:
        if tensor.numel() > _SMALL or op not in _IN_LEVELS:
            return None
        return next((place for sites in self._sites if (place := sites.of(group)) is not None), None)


_FUNCTIONAL = "torch.distributed._functional_collectives:all_reduce"
#: Elements of the largest all-reduce in two levels, and the operations that can be made in two.
_SMALL = 1024
_IN_LEVELS = {
    dist.ReduceOp.SUM: torch.sum,
    dist.ReduceOp.AVG: torch.mean,
    dist.ReduceOp.MIN: torch.amin,
    dist.ReduceOp.MAX: torch.amax,
}


def _between(place: Site, tensor: torch.Tensor, op: Any) -> Transfer:
    """Begin the all-reduce of ``tensor`` between sites. All send it to all at once: half a round trip, where a ring has more."""
    sent = tensor.view(1, -1).repeat(place.sites, 1)
    arrived = torch.empty_like(sent)
    work = dist.all_to_all_single(arrived, sent, group=place.between, async_op=True)

    def reduced() -> None:
        used_here((sent, arrived))
        tensor.view(-1).copy_(_IN_LEVELS[op](arrived, 0))

    return Transfer(work, reduced)


def make_group(
    config: LossyConfig,
    buckets: Sequence[BucketSpec],
    networks: Networks,
    members: Sequence[int],
    stream: Stream,
    steps: int | None,
    group: dist.ProcessGroup,
    site: Site | None,
) -> LossyGroup:
    """Return the exchanges of ``group``, in two levels if this rank has a place in a ``site``. See :func:`wire_for`."""
    if site is None:
        wire = wire_for(config, buckets, networks, members, dist.get_rank(group), stream, steps, group)
        return LossyGroup(config, wire)
    sites = range(site.sites)
    wire = wire_for(config, buckets, networks, sites, site.number, site.stream(stream), steps, site.between)
    return SiteGroup(config, wire, site)


class SiteGroup(LossyGroup):
    """The exchanges of a list of buckets in two levels. Its members are the ranks of one place, one of each site.

    ``wire``: carries what crosses between sites.
    """

    def __init__(self, config: LossyConfig, wire: Wire, site: Site) -> None:
        super().__init__(config, wire)
        self.site = site
        self.be_one_of(site.ranks, site.place)
        self.members = site.between
        #: Codes are of float32, as the sums that they are made of.
        self._wide = isinstance(wire, PieceWire) and "grad" in wire.coded

    def reduce_scatter(self, x: Gradients) -> Transfer:
        """See :meth:`LossyGroup.reduce_scatter`. The second level begins after the first, during computation."""
        sent = x.buffer.float() if self._wide else x.buffer
        sums = sent.new_empty(self.size * x.output.numel())
        pairs = zip(sums.chunk(self.size), sent.chunk(self.size), strict=True)
        inside, between = self.site.inside, self.site.between
        works = [over(inside, x.collective, into, run, async_op=True)() for into, run in pairs]
        carry = over(between, x.collective, x.output, sums, async_op=True)
        return later(works, partial(super().reduce_scatter, replace(x, buffer=sums, collective=carry)), sums)

    def note_all_reduce(self, bucket: int, step: int, x: Callable[[], Gradients]) -> None:
        super().note_all_reduce(bucket, step, lambda: self._summed(x()))

    def _summed(self, x: Gradients) -> Gradients:
        """Return ``x`` with the gradients of the site, which are about to be all-reduced."""
        sums = x.buffer.new_empty(x.buffer.numel() // self.ranks)
        for into, run in zip(sums.chunk(self.size), x.buffer.chunk(self.size), strict=True):
            reduce_scatter_single(into, run, group=self.site.inside)
        return replace(x, buffer=sums.div_(self.ranks) if x.averaged else sums, output=sums)

    def all_gather(
        self, bucket: int, buffer: torch.Tensor, sent: torch.Tensor, step: int, collective: Collective
    ) -> Transfer:
        """See :meth:`LossyGroup.all_gather`. The second level, inside, begins at the wait, which is in program order."""
        replica = self.view(buffer)
        own = replica.chunk(self.size)[self.rank].copy_(sent)
        carry = over(self.site.between, collective, replica, own)
        transfer = super().all_gather(bucket, replica, own, step, carry)
        transfer.apart = True
        return transfer.then(lambda _: self._spread(buffer, replica, collective))

    def put_view(self, buffer: torch.Tensor, view: torch.Tensor) -> None:
        """Put the ``view`` of each rank of the site into the ``buffer`` of all of them. A collective call of the site."""
        self._spread(buffer, view, partial(all_gather_single, buffer, view))

    def put_stale_aside(self, bucket: int, buffer: torch.Tensor, step: int) -> Callable[[], None] | None:
        return None if self.lossless("param") else partial(self.put_view, buffer, self.view(buffer))

    def _spread(self, buffer: torch.Tensor, view: torch.Tensor, gather: Collective) -> None:
        used_here((view,))
        pairs = zip(buffer.chunk(self.size), view.chunk(self.size), strict=True)
        for work in [over(self.site.inside, gather, run, part, async_op=True)() for run, part in pairs]:
            work.wait()


def over(
    group: dist.ProcessGroup, collective: Any, output: torch.Tensor, input: torch.Tensor, **options: Any
) -> Collective:
    """Return ``collective``, a ``partial`` over (output, input, …), from ``input`` into ``output`` over ``group``."""
    return partial(
        collective.func, output, input, *collective.args[2:], **{**collective.keywords, "group": group, **options}
    )


def later(works: Sequence[Any], begin: Callable[[], Transfer], tensor: torch.Tensor) -> Transfer:
    """Begin an exchange of ``tensor`` when ``works`` are over; what is computed does not wait for them.

    Exchanges begin in the order of the calls, which is the same on all ranks.
    """

    def begun() -> Transfer:
        with torch.no_grad():
            for work in works:
                work.wait()
            used_here((tensor,))
            return begin()

    if tensor.device.type == "cpu":  # where a wait holds up its thread
        future: Future[Transfer] = Future()
        _jobs().put((future, begun))
        return Transfer(SimpleNamespace(wait=future.result), lambda: future.result().wait(), apart=True)
    with aside(tensor.device):
        transfer = begun()
    transfer.apart = True
    return transfer


@cache
def _jobs() -> SimpleQueue[tuple[Future[Transfer], Callable[[], Transfer]]]:
    """Return the queue of a thread that does jobs one after another.

    It keeps no process from ending, whose ranks may wait for each other after an error.
    """
    jobs: SimpleQueue[tuple[Future[Transfer], Callable[[], Transfer]]] = SimpleQueue()

    def run() -> None:
        while True:
            future, job = jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name="megatron-lossy-sites", daemon=True).start()
    return jobs
