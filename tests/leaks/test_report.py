"""The report: its text, its picture and its data."""

import dataclasses
import json
import os
import re
import shutil
import xml.etree.ElementTree as ET

import pytest

from zbpipe.leaks import Cycle, Holder, Leak, Report


def leak(chain, size=16, fate="alive", created=None, views=1, more=0):
    return Leak((2, 2), "float32", "cpu", size, 1, views, fate, created, chain, more)


def chain(length, name="train.cache"):
    middle = [Holder("node", f"next node 0: N{i}") for i in range(length - 2)]
    return [
        Holder("module", f"module global {name}", "train.py:12"),
        *middle,
        Holder("tensor", "Tensor float32 [2, 2]", None, 16),
    ]


def report():
    held = [Holder("cell", "closure variable f of f", "a.py:3"), Holder("dict", "dict item 'x'")]
    return Report(
        leaks=[
            leak(chain(20), 64, created="train.py:30", more=2),
            leak(chain(3), 32),
            leak([*held, Holder("tensor", "Tensor float32 [2, 2]")], 16, fate="freed by the collector"),
            leak([Holder("unknown", "C or C++ that cannot be seen")], 8, views=0),
        ],
        cycles=[Cycle("closure variable f of f (a.py:3: def f():) -> dict item 'x' -> back", held, 16)],
        unseen=["nodes with C++ hooks: 1"],
        notes=["1 storage (8 bytes) as large as a bucket"],
    )


def test_the_text():
    assert str(report()) == (
        "4 storages (120 bytes) outlived the check; 1 of them only the garbage collector freed\n"
        "\n"
        "#  tensor               device  fate                    created      views  bytes\n"
        "-  -------------------  ------  ----------------------  -----------  -----  -----\n"
        "1  float32 [2, 2]       cpu     alive                   train.py:30      1     64\n"
        "2  float32 [2, 2]       cpu     alive                                    1     32\n"
        "3  float32 [2, 2]       cpu     freed by the collector                   1     16\n"
        "4  (no visible tensor)  cpu     alive                                    0      8\n"
        "\n"
        "held by\n"
        "  96 bytes, #1 to #2, and 2 more references\n"
        "    >> module global train.cache (train.py:12)\n"
        "       next node 0: N0\n"
        "       next node 0: N1\n"
        "       next node 0: N2\n"
        "       next node 0: N3\n"
        "       ... 13 more ...\n"
        "       next node 0: N17\n"
        "       Tensor float32 [2, 2]\n"
        "       and in 1 other way from there\n"
        "  16 bytes, #3\n"
        "    >> closure variable f of f (a.py:3)\n"
        "       dict item 'x'\n"
        "       Tensor float32 [2, 2]\n"
        "  8 bytes, #4\n"
        "    >> C or C++ that cannot be seen\n"
        "\n"
        "cycles\n"
        "  16 bytes: closure variable f of f (a.py:3: def f():) -> dict item 'x' -> back\n"
        "\n"
        "where the holder cannot be seen\n"
        "  let go of what you suspect (del it, clear it) inside the check: what then goes, that held"
        "\n  no leak: 1 storage (8 bytes) as large as a bucket\n"
        "  not seen: nodes with C++ hooks: 1"
    )


def test_leaks_with_one_chain_share_a_line_and_many_are_counted():
    text = str(Report(leaks=[leak(chain(3)) for _ in range(50)]))
    assert "and 30 smaller ones" in text and text.count("module global") == 1
    assert "800 bytes, #1 to #50\n" in text


def test_the_data():
    data = json.loads(json.dumps(dataclasses.asdict(report())))
    assert data["leaks"][0]["chain"][0]["text"] == "module global train.cache"
    assert report() and not Report()


def dot_of(report, folder, **limits):
    return report.draw(folder / "leaks.dot", **limits).read_text()


def edges(text):
    """The boxes of a picture by their names, and its arrows."""
    boxes = dict(re.findall(r'^(\w+) \[label="(.*?[^\\])"', text, re.MULTILINE))
    return boxes, re.findall(r"^(\w+) -> (\w+)$", text, re.MULTILINE)


def test_the_picture(tmp_path):
    """Chains share their beginning and lose their middle; a cycle has an arrow back; kinds look different."""
    text = dot_of(report(), tmp_path)
    boxes, arrows = edges(text)
    (root,) = [name for name, text in boxes.items() if text.startswith("module global train.cache")]
    (second,) = [end for begin, end in arrows if begin == root]
    assert len([end for begin, end in arrows if begin == second]) == 2
    assert any(re.fullmatch(r"\.\.\. \d+ more \.\.\.", text) for text in boxes.values())
    assert [text for text in boxes.values() if "bytes, freed by the collector" in text]
    assert ("c0_0", "c0_1") in arrows and ("c0_1", "c0_0") in arrows
    assert boxes["c0_0"] == "closure variable f of f (a.py:3)\\n16 bytes"
    assert all(f"shape={shape}" in text for shape in ("box", "hexagon"))
    assert '"filled,dashed"' in text and '"filled,rounded"' in text
    (thick, *_) = [line for line in text.splitlines() if "penwidth" in line]
    assert "module global train.cache" in thick


def test_only_the_largest_are_drawn_and_names_are_quoted(tmp_path):
    boxes, _ = edges(dot_of(report(), tmp_path, max_leaks=1))
    assert len([text for text in boxes.values() if text.startswith("Tensor")]) == 1
    odd = Report(leaks=[leak([Holder("dict", 'dict item "a\\b"'), Holder("tensor", "Tensor")])])
    assert r'label="dict item \"a\\b\""' in dot_of(odd, tmp_path)


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
def test_graphviz_draws_it(tmp_path):
    ET.fromstring(report().draw(tmp_path / "leaks.svg").read_text())
    assert report().draw(tmp_path / "leaks.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_graphviz_is_given_the_text(tmp_path, monkeypatch):
    program = tmp_path / "dot"
    program.write_text('#!/bin/sh\necho "$1" > "${2#-o}"\ncat >> "${2#-o}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert report().draw(tmp_path / "leaks.svg").read_text() == "-Tsvg\n" + dot_of(report(), tmp_path)


@pytest.mark.parametrize(
    ("name", "max_leaks", "error", "message"),
    [
        ("leaks.jpg", 10, ValueError, "leaks.jpg is no name of a picture; expected one that ends in .dot, .svg, .png"),
        ("leaks.dot", 0, ValueError, "max_leaks is 0; expected 1 or more"),
        ("leaks.png", 10, FileNotFoundError, "leaks.png needs Graphviz's program dot, .* or write a .dot file"),
    ],
)
def test_bad_pictures_are_refused(tmp_path, monkeypatch, name, max_leaks, error, message):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(error, match=message):
        report().draw(tmp_path / name, max_leaks)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_report(tmp_path):
    assert str(Report(unseen=["x"])) == "no tensor outlived the check\n  not seen: x"
    assert Report().draw(tmp_path / "none.dot").exists()
    assert report() and not Report()


def holders(*kinds):
    return [Holder(kind, f"{kind} {number}") for number, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "blamed"),
    [
        (("frame", "attribute", "list", "tensor"), 1),
        (("module", "dict", "tensor"), 0),
        (("frame", "attribute", "list", "tensor", "node", "cell", "attribute", "saved"), 1),
        (("attribute", "tensor", "hook", "cell", "tensor"), 2),
        (("attribute", "list", "accumulator", "hook", "function", "tensor"), 3),
        (("frame", "tensor", "node", "node", "hook", "cell", "tensor"), 0),  # an innocent hook in a kept graph
        (("frame", "attribute", "list", "group", "saved"), 1),
        (("attribute", "list", "object", "traceback", "frame", "tensor"), 0),
        (("unknown", "attribute", "tensor"), 1),
        (("unknown", "tensor", "node", "saved"), 0),
        (("node", "attribute", "tensor"), 0),
        (("tensor",), 0),
    ],
)
def test_who_is_to_blame(kinds, blamed):
    chain = holders(*kinds)
    assert leak(chain).blame is chain[blamed]


def test_of_a_long_chain_what_tells_most_is_kept():
    chain = holders("frame", *["list"] * 4, "attribute", "tensor", *["node"] * 20, "group", *["node"] * 9, "saved")
    said = str(leak(chain)).splitlines()[1:]
    texts = [line[5:] for line in said]
    assert [text for text in texts if text.startswith("group")]
    assert chain[5].text in texts and (texts[0], texts[-1]) == (chain[0].text, chain[-1].text)
    hidden = sum(int(text.split()[1]) for text in texts if text.startswith("..."))
    assert hidden + sum(not text.startswith("...") for text in texts) == len(chain)
    assert len(str(leak(chain[:7])).splitlines()) == 8
