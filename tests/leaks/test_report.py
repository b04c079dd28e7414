"""The report: its text, its picture and its data."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import torch

from zbpipe.leaks import Cycle, Holder, Leak, Report, _results, check_tensor_leak
from zbpipe.leaks._draw import tree

PNG = b"\x89PNG\r\n\x1a\n"


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
            leak(chain(3), 64, created="train.py:30"),
            leak(chain(20), 32, more=2),
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
        "  64 bytes, #1\n"
        "    >> module global train.cache (train.py:12)\n"
        "       next node 0: N0\n"
        "       Tensor float32 [2, 2]\n"
        "  32 bytes, #2, and 2 more references\n"
        "    >> module global train.cache (train.py:12)\n"
        "       next node 0: N0\n"
        "       next node 0: N1\n"
        "       next node 0: N2\n"
        "       next node 0: N3\n"
        "       ... 13 more ...\n"
        "       next node 0: N17\n"
        "       Tensor float32 [2, 2]\n"
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
    data = json.loads(json.dumps(report().as_dict()))
    assert data["schema"] == 2 and data["bytes"] == 120 and len(data["leaks"]) == 4
    holders = data["holders"]
    assert holders[data["leaks"][0]["chain"][0]] == {
        "kind": "module",
        "text": "module global train.cache",
        "where": "train.py:12",
        "bytes": 0,
        "is_library": False,
    }
    assert len({tuple(holder.values()) for holder in holders}) == len(holders)
    assert data["leaks"][1]["blame"] == data["leaks"][1]["chain"][0] == data["leaks"][0]["chain"][0]
    assert holders[data["cycles"][0]["steps"][1]]["text"] == "dict item 'x'"
    assert data["notes"] == ["1 storage (8 bytes) as large as a bucket"]
    assert data["cycles"][0]["bytes"] == 16 and data["unseen"] == ["nodes with C++ hooks: 1"]
    assert report() and not Report()


def test_chains_share_their_beginning_and_lose_their_middle():
    roots = tree.tree_of(report(), 10)
    assert [box.text for box in roots] == [
        "module global train.cache",
        "closure variable f of f",
        "C or C++ that cannot be seen",
    ]
    assert roots[0].bytes == 96 and len(roots[0].children) == 1
    depth, box = 1, roots[0]
    while box.children:
        depth, box = depth + 1, box.children[-1]
    assert depth == tree.LONGEST_CHAIN + 1  # and the box for the middle
    assert [box.family for box in roots] == ["python", "python", "unknown"]


def test_many_branches_are_thinned():
    leaks = [leak([*chain(2)[:1], Holder("tensor", f"Tensor {i}")], size=100 - i) for i in range(30)]
    (root,) = tree.tree_of(Report(leaks=leaks), 30)
    assert len(root.children) == tree.BRANCHES
    assert root.children[-1].text == "... 26 more ..." and root.children[0].bytes == 100
    assert sum(child.bytes for child in root.children) == root.bytes


def test_no_two_boxes_have_one_place():
    roots, cycles = tree.tree_of(report(), 10), [tree.cycle_row(report().cycles[0].steps, 16)]
    tree.place(roots, cycles)
    boxes = [*tree.all_of(roots), *cycles[0]]
    assert len({(box.column, box.row) for box in boxes}) == len(boxes)


def test_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    path = report().draw(tmp_path / "leaks.png")
    assert path.read_bytes().startswith(PNG)


def test_an_svg_tells_the_families_apart(tmp_path):
    pytest.importorskip("matplotlib")
    text = report().draw(tmp_path / "leaks.svg").read_text()
    ET.fromstring(text)
    for family in ("python", "node", "tensor", "unknown"):
        fill, line, _ = tree.FAMILIES[family]
        assert fill in text and line in text


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.linked = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.linked += [value for name, value in attributes if name in ("src", "href")]


def test_a_page_of_its_own(tmp_path):
    path = report().draw(tmp_path / "leaks.html")
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.linked == []  # nothing is fetched
    assert page.tags.count("details") == 5 and "polygon" in page.tags and "rect" in page.tags
    ET.fromstring(re.search(r"<svg.*</svg>", text, re.DOTALL).group())
    assert "closure variable f of f" in text and "&#x27;x&#x27;" in text and "<title>dict item" in text


@pytest.mark.parametrize(
    ("name", "max_leaks", "message"),
    [
        (
            "leaks.jpg",
            10,
            "a picture cannot be written to 'leaks.jpg'; expected a name that ends in .png, .svg or .html",
        ),
        ("leaks.png", 0, "max_leaks is 0; expected 1 or more"),
    ],
)
def test_bad_pictures_are_refused(tmp_path, name, max_leaks, message):
    with pytest.raises(ValueError, match=message):
        report().draw(tmp_path / name, max_leaks)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_a_page_still_works(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="needs matplotlib"):
        report().draw(tmp_path / "leaks.png")
    assert report().draw(tmp_path / "leaks.html").exists()


def test_an_empty_report(tmp_path):
    assert str(Report(unseen=["x"])) == "no tensor outlived the check\n  not seen: x"
    assert Report().draw(tmp_path / "none.html").exists()


def hold_oneself():
    def walk():
        return walk

    walk.held = torch.zeros(2)


def test_a_real_one(tmp_path):
    weight = torch.ones(3, requires_grad=True)
    kept = []
    with check_tensor_leak(action="record", allow=weight) as check:
        kept.append(weight.exp().sin())
        hold_oneself()
    found = check.report
    assert len(found.leaks) == 3 and len(found.cycles) == 1
    for name in ("a.png", "a.svg", "a.html"):
        assert found.draw(tmp_path / name).stat().st_size > 1000


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
    kept = _results.shortened(chain, 7)
    assert [holder.kind for holder in kept if holder.kind != "more"].count("group") == 1
    assert chain[5] in kept and chain[0] is kept[0] and chain[-1] is kept[-1]
    hidden = sum(int(holder.text.split()[1]) for holder in kept if holder.kind == "more")
    assert hidden + sum(holder.kind != "more" for holder in kept) == len(chain)
    assert _results.shortened(chain[:7], 7) == chain[:7]
