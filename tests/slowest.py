"""``python -m tests.slowest FOLDER``: the ten files of tests that took longest, from JUnit files of pytest in FOLDER."""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def slowest(folder: Path, count: int = 10) -> list[str]:
    """Return a line for each of the ``count`` slowest files: seconds, summed over its tests, and their number."""
    seconds: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in folder.glob("*.xml"):
        if not report.stat().st_size:  # its run was killed
            continue
        for case in ElementTree.parse(report).iter("testcase"):
            seconds[case.get("classname", "")] += float(case.get("time", 0))
            tests[case.get("classname", "")] += 1
    return [
        f"{total:.0f} s  {name.replace('.', '/')}.py, {tests[name]} tests" for name, total in seconds.most_common(count)
    ]


if __name__ == "__main__":
    print(*slowest(Path(sys.argv[1])), sep="\n")
