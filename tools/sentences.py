"""Counts the words of each sentence in Markdown pages. The exit status is 1 if a sentence is too long.

python tools/sentences.py [--most 30] README.md docs/*.md

The end of a table's cell, of a list's item and of a heading ends a sentence, as a full stop does. Blocks of code are
left out. A piece of code within a sentence counts as one word, a link as the words that name it.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = re.compile(r"^```.*?^```$|<!--.*?-->|(?<=\n\n) {4}[^\n]*(?:\n {4}[^\n]*)*", re.MULTILINE | re.DOTALL)
PART = re.compile(r"\n\s*\n|\n\s*(?:[-*]|\d+\.|\[\^\w+\]:) |^#+ .*$|<br>|\s\|\s|^\||\|$", re.MULTILINE)
END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[)\"*]*\s+")


def sentences(text: str) -> Iterator[str]:
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", LEFT_OUT.sub("\n\n", text))
    text = re.sub(r"`+[^`]+`+", "`code`", text)
    for part in PART.split(text):
        for sentence in END.split(" ".join(part.split())):
            if any(map(str.isalnum, sentence)):
                yield sentence


def words(sentence: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--most", type=int, default=30, help="words that a sentence may have (30)")
    parser.add_argument("page", type=Path, nargs="+")
    given = parser.parse_args()
    long = [
        f"{page}: {count} words: {sentence}"
        for page in given.page
        for sentence in sentences(page.read_text())
        if (count := words(sentence)) > given.most
    ]
    print("\n".join(long) if long else f"no sentence has more than {given.most} words")
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main())
