"""The pages whose tables benchmarks/tables.py makes, and what it needs for them."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_of_pages(folder):
    for path in ("benchmarks/tables.py", "requirements/newest.txt", "docs/pictures/timeline.json"):
        _copy(path, folder)
    for path in [*ROOT.glob("benchmarks/results/*.json"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        _copy(path.relative_to(ROOT), folder)
    return folder


def _copy(path, folder):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text((ROOT / path).read_text())
