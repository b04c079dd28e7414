"""torchtitan trains its debug model under the zero-bubble schedules, with nothing but ZBPIPE_PATCH=1 set, as it does
without a pipeline, and as on torch's own module where that is right: of torchtitan's defaults it is not."""

import copy
import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clients.titan_cases import CASES
from support.oracle import needs_zbpipe
from support.processes import run_ranks

import zbpipe
from zbpipe._tasks import tasks_of  # which pass computes a weight's gradient

TOO_OLD = torch.__version__ < (2, 14)
NEWER = torch.__version__ >= (2, 16)
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_zbpipe,  # runs both modules itself
    pytest.mark.skipif(
        TOO_OLD, reason="torchtitan 0.3.0 gives a schedule its microbatches (arg_mbs): torch 2.14 or newer"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("torchtitan") is None, reason="needs torchtitan (requirements/clients.txt)"
    ),
]


def parameters(*outcomes):
    """The cases of which torch's own module makes that."""
    return [
        pytest.param(name, marks=pytest.mark.long if case.long else ())
        for name, case in CASES.items()
        if not outcomes or (case.on_torch if case.on_torch in ("right", "wrong") else "raises") in outcomes
    ]


def test_torchtitan_takes_the_recipes_command_line():
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    options = re.findall(r"--[a-z_]+\.[a-z_]+(?: [a-zA-Z0-9]+)?|--(?:module|config) \w+", page)
    assert len(options) >= 7
    parse = "import sys, torchtitan.config as c; c.ConfigManager().parse_args(sys.argv[1:])"
    command = [sys.executable, "-c", parse, *" ".join(options).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def alone(name):
    """The case that trains the same without a pipeline: its schedule and when it reshards make no difference."""

    def what_matters(case):
        return replace(case, schedule="", reshard=case.reshard and "", on_torch="", exact=True, long=False)

    return next(other for other in CASES if what_matters(CASES[other]) == what_matters(CASES[name]))


class Runs:
    """All runs of an ordinary test run, or of the long one; each module's once, when a test asks for it."""

    def __init__(self, factory):
        self.factory = factory
        self.folders = {}

    def __call__(self, name, module):
        """What the ranks left, together, or what one of them said."""
        long = CASES[name].long
        if (module, long) not in self.folders:
            names = [other for other in CASES if CASES[other].long == long]
            if module == "alone":
                names = list(dict.fromkeys(map(alone, names)))
            folder = self.folders[module, long] = self.factory.mktemp(f"titan {module}")
            ranks = 2 if module == "alone" else 4
            how = "alone" if module == "alone" else "pipelined"
            variables = {"ZBPIPE_PATCH": "1"} if module == "zbpipe" else {"ZBPIPE_PATCH": "0"}
            variables["started_anew"] = True  # torchtitan is not made to find torch at work
            run_ranks("clients/titan_ranks.py", ranks, folder, how, *names, timeout=120 * len(names), **variables)
        folder = self.folders[module, long]
        name = alone(name) if module == "alone" else name
        failed = sorted(folder.glob(f"{name}.?.failed"))
        if failed:
            return "\n".join(file.read_text() for file in failed)
        ranks = [torch.load(file) for file in sorted(folder.glob(f"{name}.?"))]
        assert ranks, "\n".join(file.read_text()[-2000:] for file in sorted(folder.glob("output.?")))
        return {
            "loss": next(rank["loss"] for rank in ranks if rank["loss"] is not None),
            "norm": ranks[0]["norm"],
            "weights": {weight: value for rank in ranks for weight, value in rank["weights"].items()},
            "patched": {rank["patched"] for rank in ranks},
        }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory)


def finished(result):
    assert isinstance(result, dict), result
    return result


def digests(result):
    return {name: digest for name, (digest, _) in result["weights"].items()}


@pytest.mark.parametrize("name", parameters())
def test_it_trains_as_it_does_without_a_pipeline(name, runs):
    got, wanted = finished(runs(name, "zbpipe")), finished(runs(name, "alone"))
    assert got["patched"] == {True}
    torch.testing.assert_close(got["loss"], wanted["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(got["norm"], wanted["norm"], rtol=1e-4, atol=0)
    if CASES[name].exact and CASES[name].reshard is None:
        assert digests(got) == digests(wanted)
    else:  # sums over ranks, or kernels, in another order
        assert got["weights"].keys() == wanted["weights"].keys()
        for weight, (_, value) in wanted["weights"].items():
            mine = got["weights"][weight][1]
            torch.testing.assert_close(mine, value, rtol=1e-3, atol=1e-5, msg=lambda text, w=weight: f"{w}: {text}")


@pytest.mark.parametrize("name", parameters("right"))
def test_it_trains_as_on_torchs_own_module(name, runs):
    got, theirs = finished(runs(name, "zbpipe")), finished(runs(name, "torch"))
    assert theirs["patched"] == {False}
    assert (got["loss"], got["norm"], digests(got)) == (theirs["loss"], theirs["norm"], digests(theirs))


@pytest.mark.skipif(NEWER, reason="known of torch 2.14 and 2.15")
@pytest.mark.parametrize("name", parameters("wrong"))
def test_torchs_own_module_trains_it_wrong_silently(name, runs):
    theirs, wanted = finished(runs(name, "torch")), finished(runs(name, "alone"))
    # A norm's own rounding, over ranks in another order, is below 1e-7.
    assert any(abs(a - b) > 1e-5 * b for a, b in zip(theirs["norm"], wanted["norm"], strict=True))


@pytest.mark.skipif(NEWER, reason="known of torch 2.14 and 2.15")
@pytest.mark.parametrize("name", parameters("raises"))
def test_torchs_own_module_fails_on_it(name, runs):
    said = runs(name, "torch")
    assert isinstance(said, str)
    assert CASES[name].on_torch in said


@pytest.mark.parametrize("name", parameters())
def test_training_moves_the_loss(name, runs):
    """Else equal losses would say nothing."""
    losses = finished(runs(name, "alone"))["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("tokens", [(3, 0, 4, 1), (0, 0, 8, 0)])
def test_its_grouped_experts_are_products(tokens):
    """Their weights reach the products by a cast and a transposition."""
    from torchtitan.models.common.moe import GroupedExperts

    torch.manual_seed(0)
    experts = GroupedExperts.Config(dim=16, hidden_dim=32, num_experts=len(tokens)).build()
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    whole = copy.deepcopy(experts)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (experts, whole)]
    for _ in range(2):
        for _ in range(2):
            x = torch.randn(sum(tokens), 16, requires_grad=True)
            ref = x.detach().clone().requires_grad_()
            output = experts(x, torch.tensor(tokens))
            grad = torch.randn_like(output)
            _, groups = zbpipe.stage_backward_input([output], [grad], [x], experts.parameters())
            assert [task[1] for group in groups for task in tasks_of(group)] == ["product"] * 3
            zbpipe.stage_backward_weight(experts.parameters(), groups)
            whole(ref, torch.tensor(tokens)).backward(grad)
            assert torch.equal(x.grad, ref.grad)
        for got, expected in zip(experts.parameters(), whole.parameters(), strict=True):
            assert torch.equal(got.grad, expected.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
