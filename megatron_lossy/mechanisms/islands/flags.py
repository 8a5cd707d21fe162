"""Flags of islands: complete training jobs that exchange parameters, few at a time and late (docs/islands.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...base.errors import UsageError, refuse
from ...base.flags import as_text, check_choice, flag, flag_name, in_unit_interval, refuse_unused
from ...base.jobs import Jobs
from ...base.registry import JOBS
from ...base.section import Flags

#: Exchanges between islands: elements go to the owners of their means, and the means come back.
SYNC_PHASES = ("sync-reduce", "sync-gather")
#: Exchanges of an island that cross at once at most, each over connections of its own.
SYNC_LANES = 4
#: The folder of the mean weights, next to the folders of real islands or in that of virtual ones.
CONSENSUS_FOLDER = "consensus"
_DILOCO = ("diloco", "eager-diloco")
_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
#: Of so many elements that cross as distances in codes the outer weight of one crosses, too.
REFRESH = 32


@dataclass(frozen=True)
class IslandFlags(Flags):
    """Flags of islands. Raises :class:`UsageError` for a value not allowed."""

    rates: ClassVar[Mapping[str, str]] = dict.fromkeys(SYNC_PHASES, "p_sync")
    #: The name of one of :meth:`jobs`.
    job_name: ClassVar[str] = "island"
    #: Folders with weights alone among those of checkpoints, and the flag that makes each.
    folders_of_weights: ClassVar[Mapping[str, str]] = {CONSENSUS_FOLDER: "--save-consensus"}
    in_headings: ClassVar[bool] = True

    islands: int = flag(
        1,
        "training jobs that exchange as --sync-method says; each has data, optimizer state, clipping and "
        "a learning-rate clock of its own (docs/islands.md)",
        metavar="M",
        group="islands",
        basic=True,
    )
    sync_method: str = flag(
        None,
        "what islands exchange, needed with --islands: gradients, so that they are one data-parallel group; parameters, "
        "averaged; the same through an outer optimizer; that with a mean that is one round late; or none",
        choices=("gradients", "parameters", *_DILOCO, "none"),
        basic=True,
    )
    sync_fraction: float = flag(
        1.0,
        "parameters, diloco: share of the elements in an exchange, in (0, 1]; cyclic and partition take one in 1/F, rounded up",
        metavar="F",
        basic=True,
    )
    sync_interval: int = flag(1, "iterations between two exchanges", metavar="K", basic=True)
    sync_delay: int = flag(0, "iterations from an exchange to the use of its mean", metavar="TAU", basic=True)
    sync_subset: str = flag(
        "cyclic",
        "which elements: the next part of one fixed partition; of a partition drawn anew whenever all parts have had their "
        "turn; or each block with probability F",
        choices=("cyclic", "partition", "bernoulli"),
    )
    sync_block: int = flag(1, "consecutive elements that are exchanged together", metavar="ELEMENTS")
    sync_dtype: str = flag(
        "fp32",
        "what crosses between islands: numbers, or whole numbers of 8 bits (diloco: or 4) with a scale for each --wire-block; main "
        "weights stay fp32",
        choices=tuple(_BITS),
    )
    delay_correction: str = flag(
        "mixing",
        "parameters: what becomes of progress since the exchange began: none of it is kept; a moving average of it is added "
        "to the mean (ema), with a coefficient that is FIRST for N iterations and LAST at --train-iters after half a cosine, by "
        "default 0.5,0.01,1000; the weights move towards the mean by a share A of what they were off it then (mixing); or by a "
        "share of that less what other means have moved them since (smith); without A, mixing takes the fastest share without "
        "oscillation, by how many exchanges of an element are under way at once, and smith 1, less if some of these may be lost",
        metavar="{none,ema[:FIRST,LAST,N],mixing[:A],smith[:A]}",
    )
    outer_optimizer: tuple[float, ...] = flag(
        (0.7, 0.9),
        "diloco, eager-diloco: learning rate and Nesterov momentum of the outer optimizer",
        type=float,
        nargs=2,
        metavar=("LR", "MOMENTUM"),
    )
    island_speeds: tuple[float, ...] | None = flag(
        None,
        "speeds of the islands, one each: an island makes as many times K iterations between two exchanges as it is faster "
        "than the slowest; the iterations of all together stay the same",
        type=float,
        nargs="+",
        metavar="V",
    )
    p_sync: float = flag(0.0, "mean loss rate of the exchanges between islands, in [0, 1)", metavar="P", basic=True)

    save_consensus: bool = flag(
        False,
        "each checkpoint has a second one next to it, of the mean weights of islands alone, in the folder consensus",
        incidental=True,
    )
    island_schedule: str | None = flag(
        None,
        'file of islands that come and go, a line {"slot": 0, "at": 100, "event": "stop"} each; events are stop, freeze, cut '
        "(off from the others), return and join, before iteration at; for islands in one process (--virtual-workers)",
        metavar="FILE",
        group="islands that come and go",
    )
    island_keep: int | None = flag(
        None,
        "iterations that an island may miss and still keep its weights when it returns; default TAU + K",
        type=int,
        metavar="N",
    )
    island_rejoin: str | None = flag(
        None,
        "what islands do that missed more, or are new: copy one that is there; or listen to means, and send when these have "
        "set all weights; default copy",
        choices=("copy", "listen"),
    )
    rendezvous: str | None = flag(
        None,
        "each island is a launch of its own; they agree in this store who is there, and come and go as they like: a coordinator "
        "(tcp) or an etcd, and the name of the run (docs/elastic.md)",
        metavar="tcp://HOST:PORT/RUN|etcd://HOST:PORT,…/RUN",
        incidental=True,
    )
    island: int | None = flag(
        None,
        "with --rendezvous: the number of this island, from 0; the others are other launches",
        type=int,
        metavar="I",
        incidental=True,
    )
    sync_ranks: int | None = flag(
        None,
        "with --rendezvous: ranks of each island, the first ones, that exchange for all of it; islands may then have other numbers of "
        "ranks, N or more; by default all exchange, and have equally many",
        type=int,
        metavar="N",
    )
    island_patience: float = flag(
        10.0,
        "with --rendezvous: seconds to wait for an island that sends nothing, for means half as long again; then its message counts "
        "as lost, and it is waited for shorter",
        metavar="S",
        incidental=True,
    )
    island_join: float = flag(
        60.0,
        "with --rendezvous: seconds that a start waits for the store, a run which begins for other islands, and less than half of the "
        "islands for the rest",
        metavar="S",
        incidental=True,
    )

    @property
    def averages(self) -> bool:
        """Whether there are several islands that are not one data-parallel group."""
        return self.islands > 1 and self.sync_method != "gradients"

    @property
    def sync_bits(self) -> int:
        """Bits of an element that crosses between islands in codes; 0 without."""
        return _BITS[self.sync_dtype] if self.averages and self.sync_dtype.startswith("int") else 0

    @property
    def has_outer_optimizer(self) -> bool:
        """Whether islands have outer weights, with a momentum."""
        return self.sync_method in _DILOCO

    @property
    def sends_distances(self) -> bool:
        """Whether islands send their distance to their outer weights. Then a lost mean leaves these apart."""
        return self.sync_method == "eager-diloco" or (self.sync_method == "diloco" and self.sync_bits > 0)

    @property
    def refreshes(self: Any) -> int:
        """Outer weights that cross after each block of codes, of one element in :data:`REFRESH`, where a mean may be lost; else 0."""
        stay = self.rendezvous is None and self.island_schedule is None
        refreshes = self.sync_method == "diloco" and self.sync_bits and not (stay and self.sync_lossless)
        return self.wire_block // REFRESH if refreshes else 0

    @property
    def parts(self) -> int:
        """n: exchanges until every element has had its turn; with ``bernoulli`` on average."""
        return math.ceil(1 / self.sync_fraction - 1e-9)

    @property
    def share(self) -> float:
        """Share of the elements in an exchange; with ``bernoulli`` on average."""
        return self.sync_fraction if self.sync_subset == "bernoulli" else 1 / self.parts

    @property
    def overlap(self) -> int:
        """q: later exchanges of an element under way when one comes back; with ``bernoulli`` about the least number."""
        return self.rounds_under_way // self.parts

    @property
    def mean_overlap(self) -> float:
        """:attr:`overlap`, with ``bernoulli`` on average."""
        return self.share * self.rounds_under_way if self.sync_subset == "bernoulli" else self.overlap

    @property
    def may_overlap(self) -> bool:
        """Whether an element can be in an exchange while it is in another."""
        # With equal gaps (cyclic) only if q is not 0; with drawn ones two may follow each other.
        return bool(self.overlap or (self.sync_subset != "cyclic" and self.rounds_under_way and self.parts > 1))

    @property
    def rounds_under_way(self) -> int:
        """Later exchanges, of any elements, that are under way when one comes back."""
        return self.sync_delay // self.sync_interval

    @property
    def lanes(self) -> int:
        """Exchanges of a vector that cross at once, each carried by itself."""
        return min(SYNC_LANES, max(1, self.rounds_under_way))

    @property
    def correction(self) -> str:
        """The name of ``--delay-correction``."""
        return self.delay_correction.partition(":")[0]

    @property
    def ema_coefficient(self) -> tuple[float, float, int]:
        """FIRST, LAST and N of ``ema``. Raises :class:`UsageError`."""
        try:
            first, last, hold = (self.delay_correction.partition(":")[2] or "0.5,0.01,1000").split(",")
            found = float(first), float(last), int(hold)
            if not (0 < found[0] <= 1 and 0 < found[1] <= 1 and found[2] >= 0):
                raise ValueError
        except ValueError:
            allowed = "must be ema:FIRST,LAST,N, two numbers in (0, 1], and iterations of at least 0"
            raise refuse("--delay-correction", self.delay_correction, allowed) from None
        return found

    @property
    def gain(self) -> float | None:
        """A of ``mixing`` and ``smith``, if it is given. Raises :class:`UsageError`."""
        text = self.delay_correction.partition(":")[2]
        try:
            gain = float(text) if text else None
        except ValueError:
            gain = math.nan
        if gain is not None and not 0 < gain < 2:
            raise refuse("--delay-correction", self.delay_correction, f"must be {self.correction}:A, with A in (0, 2)")
        return gain

    @property
    def rejoin(self) -> str:
        """The way back of islands that missed too much, or are new: "copy" or "listen"."""
        return self.island_rejoin or "copy"

    @property
    def keep(self) -> int:
        """The largest lag of an island that does not count as stopped, in iterations."""
        return self.sync_delay + self.sync_interval if self.island_keep is None else self.island_keep

    @property
    def relative_speeds(self) -> tuple[float, ...]:
        """Local iterations of every island per iteration of the slowest."""
        return tuple(map(self.relative_speed, range(self.islands)))

    def relative_speed(self, island: int) -> float:
        """Return local iterations of ``island`` per iteration of the slowest."""
        return 1.0 if self.island_speeds is None else self.island_speeds[island] / min(self.island_speeds)

    @property
    def sync_lossless(self) -> bool:
        """Whether exchanges between islands can lose nothing."""
        return not self.observed and self._draws_nothing

    @property
    def _draws_nothing(self) -> bool:
        return all(self.phase(phase).lossless for phase in SYNC_PHASES)

    def exchanges(self) -> tuple[str, ...]:
        return SYNC_PHASES if self.averages else ()

    def changes(self) -> bool:
        return self.averages

    def streams(self) -> bool:
        return self.rendezvous is not None

    def jobs(self) -> Jobs:
        """Return the jobs of a run."""
        islands: type[Jobs] = JOBS.load(self.job_name)
        number = self.islands if self.averages else 1
        return islands(number, apart=self.rendezvous is not None, config=self)  # type: ignore[call-arg]

    def element_bytes(self) -> int:
        """Return the bytes of an element in exchanges between islands; 0 without any."""
        return -(-_BITS[self.sync_dtype] // 8) if self.averages else 0

    def resolve(self) -> None:
        if self.sync_method is None and self.islands == 1:
            object.__setattr__(self, "sync_method", "gradients")
        if self.eval_weights is None:
            of_islands = "consensus" if self.rendezvous is None else "owner"
            object.__setattr__(self, "eval_weights", of_islands if self.averages else "replica")

    def notes(self) -> list[str]:
        if not self.averages:
            return []
        if self.sync_method == "none":
            return [f"{self.islands} islands that exchange nothing"]
        what = f"{self.islands} islands, {self.sync_method}, {100 * self.share:.3g} % of them"
        correction = f" ({self.delay_correction})" if self.sync_method == "parameters" and self.sync_delay else ""
        when = f"every {self.sync_interval} iterations, used after {self.sync_delay}{correction}"
        lost = f"lost {self.label(SYNC_PHASES[0])}"
        if self.observed:
            drawn = not self._draws_nothing
            lost = f"{lost} and what the network loses" if drawn else "lost what the network loses"
        churn = "" if self.island_schedule is None else f", come and go by {self.island_schedule}"
        if self.rendezvous is not None:
            churn = f"; this is island {self.island}, the others meet it at {self.rendezvous}"
        return [f"{what} {when}, {lost}{churn}"]

    def iterations(self, train_iters: int) -> int:
        """Return the iterations of the slowest island: all M together make at most M times ``train_iters``."""
        if not self.averages or self.island_speeds is None:
            return train_iters
        return int(self.islands * train_iters / sum(self.relative_speeds) + 1e-9)

    def most_iterations(self, iterations: int) -> int:
        """Return the iterations of the fastest island when the slowest has made ``iterations``."""
        return max(self.local_iterations(island, iterations) for island in range(self.jobs().number))

    def local_iterations(self, island: int, iteration: int) -> int:
        """Return number of iterations that ``island`` has made when the slowest has made ``iteration``."""
        return int(iteration * self.relative_speed(island) + 1e-9)

    def check(self) -> None:
        in_unit_interval("--p-sync", self.p_sync)
        if self.islands < 1:
            raise refuse("--islands", self.islands, "must be at least 1")
        if self.sync_method is None:
            methods = "parameters, diloco, eager-diloco, none, or gradients for one data-parallel group"
            raise refuse("--islands", self.islands, f"needs --sync-method: {methods}")
        for name in ("sync_method", "sync_subset", "sync_dtype"):
            check_choice(self, name)
        self._check_used()
        self._need("sync_fraction", 0 < self.sync_fraction <= 1, "must be in (0, 1]")
        for name, least in (("sync_interval", 1), ("sync_block", 1), ("sync_delay", 0)):
            self._need(name, getattr(self, name) >= least, f"must be at least {least}")
        self._need("island_keep", self.keep >= 0, "must be at least 0")
        self._need("island_rejoin", self.island_rejoin in (None, "copy", "listen"), "must be one of copy, listen")
        self._check_apart()
        if self.correction not in ("none", "ema", "mixing", "smith") or self.delay_correction.startswith("none:"):
            raise refuse("--delay-correction", self.delay_correction, "must be one of none, ema, mixing, smith")
        _ = self.ema_coefficient if self.correction == "ema" else self.gain
        lr, momentum = self.outer_optimizer
        self._need("outer_optimizer", 0 < lr < math.inf and 0 <= momentum < 1, "must be above 0, and in [0, 1)")
        if self.sync_method == "diloco":
            least = self.sync_interval * (self.parts if self.sync_subset == "cyclic" else 1)
            allowed = f"must be below {least}, after which an element is sent again, with --sync-method diloco"
            self._need("sync_delay", not self.may_overlap, allowed)
        if self.sync_method == "eager-diloco":
            allowed = f"must be --sync-interval {self.sync_interval} with --sync-method eager-diloco"
            self._need("sync_delay", self.sync_delay == self.sync_interval, allowed)
        if self.island_speeds is not None:
            self._check_speeds(self.island_speeds)

    def _check_apart(self) -> None:
        """Raise :class:`UsageError` for flags of islands that are launches of their own."""
        if self.rendezvous is None:
            return
        from .membership.store import check_url

        _, _, _, ours = check_url(self.rendezvous)
        if ours and self.udp_key_file in (None, "none"):
            raise UsageError("--udp-key-file: needs the key file of the coordinator, with --rendezvous tcp://")
        slots = f"--islands {self.islands} has slots 0 to {self.islands - 1}"
        if self.island is None:
            raise UsageError(f"--island: needs a value: {slots}")
        self._need("island", 0 <= self.island < self.islands, slots)
        self._need("sync_ranks", self.sync_ranks is None or self.sync_ranks >= 1, "must be at least 1")
        self._need("island_patience", 0 < self.island_patience < math.inf, "must be seconds above 0")
        self._need("island_join", 0 <= self.island_join < math.inf, "must be seconds of at least 0")

    def _need(self, name: str, fine: bool, allowed: str) -> None:
        if not fine:  # NaN is never fine
            raise refuse(flag_name(type(self), name), as_text(getattr(self, name)), allowed)

    def _check_used(self) -> None:
        """Raise :class:`UsageError` for a flag that does nothing."""
        method, corrected = self.sync_method, self.averages and self.sync_method == "parameters"
        in_parts = corrected or (self.averages and method == "diloco")
        parameters = "--islands and --sync-method parameters"
        # In the order in which they are asked for: what a flag needs comes before it.
        uses = (
            ("sync_method", self.islands > 1 or method == "gradients", "--islands of at least 2"),
            ("island_speeds save_consensus", self.averages, "--islands and a --sync-method other than gradients"),
            (
                "p_sync sync_interval sync_delay sync_dtype",
                self.averages and method != "none",
                "--islands and a --sync-method of parameters, diloco or eager-diloco",
            ),
            (
                "sync_fraction sync_subset sync_block island_schedule rendezvous",
                in_parts,
                "--islands and a --sync-method of parameters or diloco",
            ),
            ("island sync_ranks island_patience island_join", self.rendezvous is not None, "--rendezvous"),
            ("island_keep", corrected, f"{parameters}: outer weights are copied after every absence"),
            ("island_rejoin", corrected, f"{parameters}: outer weights can only be copied"),
            ("delay_correction", corrected, parameters),
            ("outer_optimizer", self.has_outer_optimizer, "--sync-method diloco or eager-diloco"),
        )
        for names, used, needs in uses:
            for name in () if used else names.split():
                refuse_unused(self, name, f"needs {needs}")

    def _check_speeds(self, speeds: tuple[float, ...]) -> None:
        if len(speeds) != self.islands or not all(0 < speed < math.inf for speed in speeds):
            raise refuse("--island-speeds", as_text(speeds), f"must be {self.islands} positive numbers, one per island")
        for speed, relative in zip(speeds, self.relative_speeds):
            between = self.sync_interval * relative
            if self.sync_method != "none" and abs(between - round(between)) > 1e-6:
                why = f"gives an island {between:g} iterations between two exchanges; choose another --sync-interval"
                raise refuse("--island-speeds", f"{speed:g} of {as_text(speeds)}", why)
