"""``module.parameters()`` as a pass is given it: the same parameters, in the same order, without torch's generators."""

import gc
import random
import sys

import pytest
import torch
from support.oracle import needs_zbpipe, zb
from torch import nn

pytestmark = needs_zbpipe


class Tree(nn.Module):
    """A random module: parameters and children of other modules among its own, Nones, empty ones."""

    def __init__(self, random_numbers, depth, known):
        super().__init__()
        for i in range(random_numbers.randrange(4)):
            shared = [p for module in known for p in module._parameters.values()]
            new = random_numbers.random() < 0.7 or not shared
            self.register_parameter(f"w{i}", nn.Parameter(torch.ones(2)) if new else random_numbers.choice(shared))
        self.register_parameter("none", None)
        known.append(self)
        for i in range(random_numbers.randrange(4) if depth else 0):
            new = random_numbers.random() < 0.8
            setattr(self, f"m{i}", Tree(random_numbers, depth - 1, known) if new else random_numbers.choice(known))
        self.add_module("nothing", None)


def ids(parameters):
    return [id(parameter) for parameter in parameters]


def listed(parameters):
    from zbpipe import _parameters

    return _parameters.listed(parameters)


@pytest.mark.parametrize("seed", range(50))
def test_random_trees_with_shared_parameters_and_children_in_circles(seed):
    net = Tree(random.Random(seed), 4, [])
    found = listed(net.parameters())
    assert type(found) is list
    assert ids(found) == ids(net.parameters())


def own_walk(net):
    class OwnWalk(nn.Linear):
        def named_modules(self, *args, **kwargs):
            yield from ()

    net[1] = OwnWalk(2, 2)


def own_walk_of_one(net):
    net[1].named_modules = lambda *args, **kwargs: iter([("other", nn.Linear(3, 3))])


def own_names_of_one(net):
    net.named_parameters = lambda **how: iter([("other", nn.Parameter(torch.ones(1)))])


def own_members_of_one(net):
    net._named_members = lambda *args, **kwargs: iter([])


def scripted(net):
    net[1] = torch.jit.script(nn.Linear(2, 2))


def other_mapping(net):
    from collections import OrderedDict

    object.__setattr__(net[1], "_parameters", OrderedDict(net[1]._parameters))
    net[1]._parameters.move_to_end("weight")


@pytest.mark.parametrize(
    "change", [own_walk, own_walk_of_one, own_names_of_one, own_members_of_one, scripted, other_mapping]
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning", "ignore:.torch.jit:FutureWarning")
def test_a_module_that_walks_its_own_way_is_left_to_it(change):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    change(net)
    torchs = net.parameters()
    assert listed(torchs) is torchs
    assert len(list(torchs)) == len(list(net.parameters()))


def test_what_is_no_untouched_walk_over_all_is_taken_as_it_is():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    begun = net.parameters()
    next(begun)
    ended = net.parameters()
    list(ended)
    for given in (begun, ended, net.parameters(recurse=False), iter([]), (w for w in net.parameters()), [], None):
        assert listed(given) is given
    assert len(list(begun)) == 3


def test_torchs_generator_is_exhausted():
    given = nn.Linear(2, 2).parameters()
    assert len(listed(given)) == 2
    assert list(given) == []


def test_a_module_that_was_never_set_up_raises_as_in_torch():
    class Empty(nn.Module):
        def __init__(self):
            pass

    with pytest.raises(AttributeError) as torchs:
        list(Empty().parameters())
    with pytest.raises(AttributeError) as ours:
        listed(Empty().parameters())
    assert type(ours.value) is type(torchs.value)


def test_nothing_is_left_of_a_walk():
    net = Tree(random.Random(1), 3, [])
    things = [*net.modules(), *net.parameters()]
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(3):
        listed(net.parameters())
    gc.collect()
    assert [sys.getrefcount(thing) for thing in things] == before


def test_both_passes_walk_without_torchs_generators():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    x = torch.ones(2, 4, requires_grad=True)
    out = net(x)
    walked = []

    def note(frame, event, _):
        if frame.f_code is nn.Module.named_modules.__code__ and frame.f_locals["self"] is net:
            walked.append(event)

    sys.setprofile(note)
    try:
        _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())
        grads = zb.stage_backward_weight(net.parameters(), groups)
    finally:
        sys.setprofile(None)
    assert not walked
    assert len(grads) == 6 and all(grad is not None for grad in grads)
