"""Makes a file for ``--island-schedule``: islands that are away in spells, of which some are under way at any time.

``python -m scripts.spells OUT --islands 8 --iterations 300 --away 0.25 --length 60 --event stop --seed 1``
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path


def spells(islands: int, iterations: int, away: float, length: int, event: str, seed: int) -> list[dict[str, object]]:
    """Return the events by time. A share ``away`` of ``islands`` is away on average, each for ``length`` ± 50 %.

    Every island alternates between being there and away; spells that would leave fewer than two islands are left out.
    Those that last beyond the end do not end.
    """
    draw = random.Random(seed)
    there = length * (1 - away) / away
    found: list[tuple[int, int, int]] = []
    for slot in range(islands):
        # The first spell may be under way before the run: so as many are away at the beginning as later.
        at = draw.uniform(-1, 1) * (there + length) / 2
        while at < iterations:
            lasts = max(1, round(length * draw.uniform(0.5, 1.5)))
            if at > 0:
                found.append((max(1, round(at)), max(1, round(at)) + lasts, slot))
            at += lasts + there * draw.uniform(0.5, 1.5)
    kept: list[tuple[int, int, int]] = []
    for begin, end, slot in sorted(found):
        away_too = [other for first, last, other in kept if first <= begin <= last]
        if begin < iterations and len(away_too) < islands - 2 and slot not in away_too:
            kept.append((begin, end, slot))
    events = [(begin, slot, event) for begin, _, slot in kept]
    events += [(end, slot, "return") for _, end, slot in kept if end < iterations]
    return [{"slot": slot, "at": at, "event": what} for at, slot, what in sorted(events)]


def share_away(events: list[dict[str, object]], islands: int, iterations: int) -> float:
    """Return the share of island-iterations that are not made, or made alone."""
    left: dict[object, int] = {}
    missed = 0
    for event in events:
        at = int(str(event["at"]))
        if event["event"] == "return":
            missed += at - left.pop(event["slot"])
        else:
            left[event["slot"]] = at
    missed += sum(iterations - at for at in left.values())
    return missed / (islands * iterations)


def main() -> None:
    """Write the file, and print its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--islands", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--away", type=float, default=0.25, help="share of islands that are away")
    parser.add_argument("--length", type=int, default=60, help="iterations of a spell")
    parser.add_argument("--event", choices=("stop", "freeze", "cut"), default="stop")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    events = spells(given.islands, given.iterations, given.away, given.length, given.event, given.seed)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(event) + "\n" for event in events))
    away = share_away(events, given.islands, given.iterations)
    returns = sum(event["event"] == "return" for event in events)
    print(f"{given.out}: {100 * away:.1f} % away, {returns} returns")


if __name__ == "__main__":
    main()
