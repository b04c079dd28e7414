"""No sentence of the pages has more than 30 words: tools/sentences.py counts."""

from pathlib import Path

import pytest
from support.processes import python

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").glob("*.md"))]


def count(*arguments):
    return python(ROOT / "tools" / "sentences.py", *arguments)


def test_sentences_of_the_pages_are_short():
    assert len(PAGES) > 15
    done = count(*PAGES)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("One two three. Four\nfive", 3),
        ("| one two | three four five |\n|---|---|\n| one<br>two three | four |", 3),
        ("- one two:\n- three `a b c` [four](five six.md)\n\n```sh\none two three four\n```", 3),
        ("# One two\n\nOne two 3.5 four <!-- one two three four five -->.", 4),
    ],
)
def test_what_is_counted(text, most, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert count("--most", str(most), page).returncode == 0
    done = count("--most", str(most - 1), page)
    assert (done.returncode, len(done.stdout.splitlines())) == (1, 1)
    assert done.stdout.startswith(f"{page}: {most} words: ")
