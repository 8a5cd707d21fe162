"""Idioms that ``make lint`` refuses (scripts/words.py)."""

import pytest

from scripts import words

pytestmark = pytest.mark.shows("refused idioms are found in code, comments and pages", device=False)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.py",
            'def f() -> int:\n    """The number."""\n    # Fine.\n    # What is lost is gone.\n    return 1\n',
            [2, 4],
        ),
        ("a.py", '@property\ndef f() -> int:\n    """The number of ``told``. What now?"""\n    return 1\n', []),
        ("a.py", 'x = "a rank knows it"\ny = "gave up"\n', [1]),
        ("a.md", "# What it is\n\n`told`\n\nA rank\ngives\nup. Who waits?\n", [7]),
        ("a.c", "int told; /* one\n * that hears */\n// Whoever waits.\n", [2, 3]),
        ("a.yaml", "told: 1 # beside it\n# You know.\n", [1]),
    ],
)
def test_idioms_are_refused_where_words_are(tmp_path, name, text, expected):
    path = tmp_path / name
    path.write_text(text)
    assert [int(line.removeprefix(f"{path}:").partition(":")[0]) for line in words.refused(path)] == expected
