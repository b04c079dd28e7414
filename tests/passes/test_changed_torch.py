"""A library whose formulas differ from torch's, and whose stand-ins call hooks in another order: as if torch had changed.
The self-check finds the ones and runs such nodes whole, test_call_function.py finds the other."""

import pytest
from support import trees

pytestmark = trees.needs_a_compiler

PLANTS = {
    "csrc/shim/torch/separable.cpp": (
        "n->mat1_, n->mat2_, 1, is_one(n->alpha) && is_one(n->beta)",
        "n->mat1_, n->mat2_, 1, true",
    ),
    "csrc/shim/weight/gradients.cpp": (
        "return {std::move(input), std::move(weight), std::move(bias)};",
        "return {std::move(input), weight.neg(), std::move(bias)};",
    ),
    "csrc/shim/group/facts.cpp": ("grad.transpose(n->dim0, n->dim1)", "grad.transpose(n->dim0, n->dim1).neg()"),
    "csrc/shim/engine/stand_in.cpp": (
        "call_pre_hooks(node, call_tensor_hooks(node, std::move(grads), skip_undefined))",
        "call_tensor_hooks(node, call_pre_hooks(node, std::move(grads)), skip_undefined)",
    ),
}

STEPS = """
import copy, torch, zbpipe
ours = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 2), torch.nn.Flatten(), torch.nn.Linear(9, 4)).double()
theirs = copy.deepcopy(ours)
for _ in range(2):
    x = torch.randn(5, 2, 4, dtype=torch.float64, requires_grad=True)
    dx, groups = zbpipe.stage_backward_input([ours(x).sum()], None, [x], ours.parameters())
    zbpipe.stage_backward_weight(ours.parameters(), groups)
    theirs(x).sum().backward()
assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters()))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    tree = trees.copy(tmp_path_factory.mktemp("changed") / "tree")
    for file, (before, after) in PLANTS.items():
        trees.plant(tree / file, before, after)
    trees.build(tree)
    return tree


@pytest.mark.parametrize("file", PLANTS)
def test_a_fault_has_its_place(file):
    trees.with_place(trees.ROOT / file, PLANTS[file][0])


@pytest.mark.long
def test_what_torch_computes_otherwise_is_named_and_runs_whole(tree):
    done = trees.run(tree, "-c", STEPS)
    assert done.returncode == 0, done.stderr
    named = [line.split()[0] for line in done.stderr.splitlines() if "gives another gradient than zbpipe's" in line]
    assert sorted(named) == ["AddmmBackward0", "ConvolutionBackward0", "TransposeBackward0"]


@pytest.mark.long
def test_hooks_in_another_order_are_found(tree):
    options = ("-c", trees.ROOT / "pyproject.toml", "--rootdir", trees.ROOT, "-q", "-p", "no:cacheprovider")
    done = trees.run(tree, "-m", "pytest", *options, "passes/test_call_function.py")
    assert " failed" in done.stdout and "assert made == calls" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
