"""Each place of the core and its conductors that asks for memory has been refused it once: sites.py FILE, what sites.h wrote."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKS = re.compile(r"\b(zbpi_resize|zbpi_grow|zbpi_block_new|malloc|calloc|realloc|strdup)\(")
# Theirs is the allocator itself; whoever calls it is a site.
ITSELF = "csrc/core/base/zbp_alloc.c"


def end_of_call(text, start):
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0 and text[i] == ")":
            return i
    raise ValueError("a call without an end")


def sites():
    """(file, first line, last line)."""
    for path in sorted(
        [*ROOT.glob("csrc/core/*/*.c"), *ROOT.glob("csrc/instruments/core/*.c"), *ROOT.glob("csrc/pass/*.c")]
    ):
        name = path.relative_to(ROOT).as_posix()
        text = re.sub(r"/\*.*?\*/", lambda found: re.sub(r"[^\n]", " ", found[0]), path.read_text(), flags=re.DOTALL)
        for call in ASKS.finditer(text):
            if name != ITSELF:
                last = end_of_call(text, call.end() - 1)
                yield name, 1 + text.count("\n", 0, call.start()), 1 + text.count("\n", 0, last)


def main(told):
    failed = {(file, int(line)) for file, line in (entry.rsplit(":", 1) for entry in Path(told).read_text().split())}
    all_sites = list(sites())
    never = [
        f"{file}:{first}"
        for file, first, last in all_sites
        if not any((file, line) in failed for line in range(first, last + 1))
    ]
    for where in never:
        print(f"{where}: was never refused memory", file=sys.stderr)
    print(f"{len(all_sites)} places ask for memory, {len(all_sites) - len(never)} of them were refused it")
    print(f"{len(all_sites) - len(never)} passed, {len(never)} failed")
    sys.exit(bool(never) or not all_sites)


main(sys.argv[1])
