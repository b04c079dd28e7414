"""Faults planted in a copy of the sources, each of which the device that runs late must find."""

import pytest
from support import trees
from support.trees import ROOT

pytestmark = trees.needs_a_compiler

KEPT = "csrc/shim/group/kept.cpp"
CALL = "csrc/shim/weight/weight_call.cpp"

# What is changed, and the cases that must fail.
MUTANTS = {
    "W does not wait for its caller": (CALL, "call.streams.follow_caller();", "", "streams"),
    "the caller does not wait for W": (CALL, "call.streams.join();", "", "streams"),
    "what a W that raised has added is not joined": (
        CALL,
        "call.streams.join();",
        "if (first == 0) call.streams.join();",
        "hooks",
    ),
    "the other one waits": (KEPT, "second.wait(done);", "first.wait(done);", "streams"),
    "events of the wrong stream": (KEPT, "done.record(first);", "done.record(second);", "streams"),
    "what is kept on another stream is not waited for": (KEPT, "    order(*stream_, here);\n", "", "streams"),
    "the allocator is not told of what is read elsewhere": (KEPT, "  record_here(tensor_);\n", "", "streams"),
    "a capture waits for what is outside": (KEPT, "stream != callers && (", "stream != callers || (", "devices"),
    "W adds where the accumulator is not": (CALL, "kept.stream() != stream", "kept.stream() != kept.stream()", "pairs"),
    "what I unpacks is not waited for": (
        "csrc/shim/group/saved_outside.cpp",
        "      order(*there, *here);\n",
        "",
        "hooks",
    ),
    "what I unpacks is made on the stream of whoever is first": (
        "csrc/shim/group/saved_outside.cpp",
        "on_its_stream(there);",
        "on_its_stream(here);",
        "pairs",
    ),
    "the allocator is not told of an input gradient's copy": (
        "csrc/shim/input/input_grads.cpp",
        "    record_here(grads[i]);",
        "",
        "pairs",
    ),
}


def passes(tree, cases):
    options = ("-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-q", "-x", f"late_device/{cases}_cases.py")
    done = trees.run(tree, "-m", "pytest", *options, "-p", "no:cacheprovider", "-p", "no:xdist")
    assert " passed" in done.stdout or " failed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    return " failed" not in done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = trees.copy(tmp_path_factory.mktemp("mutants") / "tree")
    trees.build(tree)
    return tree


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_has_its_place(name):
    file, before, _, _ = MUTANTS[name]
    trees.with_place(ROOT / file, before)


@pytest.mark.long
def test_the_copy_is_right(tree):
    assert passes(tree, "streams")


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(tree, name):
    file, before, after, cases = MUTANTS[name]
    text = trees.plant(tree / file, before, after)
    try:
        trees.build(tree)
        assert not passes(tree, cases)
    finally:
        (tree / file).write_text(text)
