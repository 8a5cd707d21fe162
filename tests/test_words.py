"""Idioms that ``make lint`` refuses (scripts/words.py)."""

import pytest

from scripts import words

pytestmark = pytest.mark.shows("refused idioms are found in code, comments and pages", device=False)
REFUSED = {
    "function.py": ('def f() -> int:\n    """The number."""\n    # Fine.\n    # What is lost is gone.\n', [2, 4]),
    "property.py": ('@property\ndef f() -> int:\n    """The number of ``told``. What now?"""\nx = "gave up"\n', []),
    "page.md": ("# What it is\n\n`told`\n\nA rank\ngives\nup. Who waits?\n", [7]),
    "code.c": ("int told; /* one\n * that hears */\n// Whoever waits.\n", [2, 3]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_idioms_are_refused_where_words_are(tmp_path, name):
    path, (text, lines) = tmp_path / name, REFUSED[name]
    path.write_text(text)
    assert [int(line.removeprefix(f"{path}:").partition(":")[0]) for line in words.refused(path)] == lines
