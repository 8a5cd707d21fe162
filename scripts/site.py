"""Build the documentation as a site: ``make site``, or ``python -m scripts.site [--source URL]``.

Pages of docs/, CONTRIBUTING.md and CHANGELOG.md are copied with the pictures and records to which they lead. Links to other files of
the repository lead to their source. The API reference is made of docstrings. zensical builds the site in build/site/html, and fails for
a link that leads nowhere.
"""

from __future__ import annotations

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "zensical.toml"
WORK = ROOT / "build" / "site"
#: Modules whose docstrings are the reference for users and for authors of mechanisms, each with a page.
API = (
    "pytorch",
    "config",
    "plugin",
    "delivery_log",
    "channel.base",
    "recovery.base",
    "transport.base",
    "run.mechanism",
)
_LINK = re.compile(r"(\]\()([^)\s]+)(?=\))|(^\[[^\]]+\]:\s*)(\S+)", re.MULTILINE)


def pages() -> dict[str, Path]:
    """Return the files of the site, by their place in it."""
    docs = ROOT / "docs"
    files = {path.relative_to(docs).as_posix(): path for path in sorted(docs.rglob("*")) if path.is_file()}
    return files | {name: ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md")}


def source_of(repository: str | None) -> str:
    """Return the address of the repository's files: ``repository``, that of a workflow of GitHub, or this checkout."""
    if repository is None and "GITHUB_REPOSITORY" in os.environ:
        repository = "https://github.com/{GITHUB_REPOSITORY}/blob/{GITHUB_SHA}".format_map(os.environ)
    return repository or ROOT.as_uri()


class Pages:
    """The pages of the site in ``folder``, with links to ``source`` for files of the repository that are not in it."""

    def __init__(self, folder: Path, source: str) -> None:
        self._folder, self._source = folder, source
        self._places = {path: place for place, path in pages().items()}

    def write(self) -> None:
        """Write all pages, and the pictures and records to which they lead."""
        written: set[Path] = set()
        while left := self._places.keys() - written:
            for path in left:
                self._write(path, self._folder / self._places[path])
            written |= left

    def _write(self, path: Path, there: Path) -> None:
        there.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            good = _LINK.sub(
                lambda found: (found[1] or found[3]) + self._led(path, found[2] or found[4]), path.read_text()
            )
            there.write_text(good)
        else:
            shutil.copy(path, there)

    def _led(self, path: Path, target: str) -> str:
        """Return the address in the site of the link to ``target`` in the page ``path``."""
        name, mark, anchor = target.partition("#")
        if not name or re.match(r"[a-z]+:", name):
            return target
        found = Path(os.path.normpath(path.parent / name))
        if not found.exists():
            raise SystemExit(f"site: {path.relative_to(ROOT)}: {target} does not exist")
        inside = found.relative_to(ROOT).as_posix()
        if found.suffix in (".png", ".md"):
            self._places.setdefault(found, inside)
        if found not in self._places:
            return f"{self._source}/{inside}{mark}{anchor}"
        return posixpath.relpath(self._places[found], posixpath.dirname(self._places[path]) or ".") + mark + anchor


def write_api(folder: Path) -> None:
    """Write a page of the reference for each module of :data:`API`."""
    folder.mkdir()
    for module in API:
        (folder / f"{module}.md").write_text(f"# `megatron_lossy.{module}`\n\n::: megatron_lossy.{module}\n")


def main() -> int:
    """Build the site, and return the exit status of zensical."""
    parser = argparse.ArgumentParser(prog="python -m scripts.site", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--source", metavar="URL", help="address of the repository's files; default this checkout")
    arguments = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    Pages(WORK / "docs", source_of(arguments.source)).write()
    write_api(WORK / "docs" / "api")
    text = CONFIG.read_text().format(api=", ".join(f'"api/{name}.md"' for name in API))
    (WORK / CONFIG.name).write_text(text)
    zensical = Path(sys.executable).with_name("zensical")
    return subprocess.run([zensical, "build", "--strict", "--config-file", WORK / CONFIG.name], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
