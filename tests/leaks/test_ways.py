"""The search's own parts: handles, what was met, ranks and ways against naive models."""

import itertools
import random
import weakref

import torch

from zbpipe import _C  # handles, which no report shows
from zbpipe.leaks import _heap, _ways  # a naive model is of places and edges, not of words

KEPT = []


# ---- handles


def held_by(thing, label):
    return next(held for held, said, _ in _C.references_of(thing) if said == label)


def test_a_thing_has_one_handle_which_makes_it_no_python_object():
    out = torch.ones(3, requires_grad=True).exp()
    tensor = _C.handle_of(out)
    node = held_by(tensor, "grad_fn")
    assert tensor is _C.handle_of(out) and tensor.object is out
    assert (node.kind, node.name, node.object) == ("node", "ExpBackward0", None)
    saved = held_by(node, "saved_result")
    assert (saved.kind, saved.name, saved.object) == ("tensor", "float32 [3]", None)
    assert saved is not tensor and saved.storage is tensor.storage
    assert node.object is None and _C.handle_of(out.grad_fn) is node and node.object is out.grad_fn
    assert _C.handle_of(object()) is None and _C.handle_of(None) is None


def test_a_handle_owns_its_thing_and_does_not_count_itself():
    out = torch.ones(3)
    handle = _C.handle_of(out)
    native, python, *_ = handle.counts
    assert native == 1 and python >= 2
    gone = weakref.ref(out)
    storage = handle.storage
    del out
    assert handle.counts[0] == 1 and gone() is not None  # as if somebody in C++ held it
    watched = _C.watch_storages([storage])
    del handle, storage
    assert gone() is None and len(_C.storages_gone(watched)) == 1 and _C.storage_spans(watched) == []


def test_what_a_handle_says_of_tensors_and_storages():
    handle = _C.handle_of(torch.ones(4, 4)[0])
    assert handle.facts == ((4,), torch.float32, 16)
    address, size, device, is_foreign = handle.storage.memory
    assert address and (size, device) == (64, "cpu") and type(is_foreign) is bool
    assert handle.memory is None and handle.storage.facts is None
    assert torch.equal(handle.wrap(), torch.ones(4))


# ---- ranks and ways


class Heap:
    """Places from `reached` on; `edges` and `seen` as the search leaves them."""

    def __init__(self, edges, unseen, reached=3):
        self.edges, self.unseen, self.reached = edges, unseen, reached
        self.things = [object() for _ in range(reached)] + [[] if i % 3 else {} for i in range(len(edges))]
        self.parents = [-1, 0, 1] + [-1] * len(edges)

    def is_held_unseen(self, place, target):
        return place - self.reached in self.unseen


def reachable(edges, begin):
    found, todo = set(), list(begin)
    while todo:
        for to in edges[todo.pop()]:
            if to not in found:
                found.add(to)
                todo.append(to)
    return found


def random_heap(seed):
    draw = random.Random(seed)
    count = draw.randrange(1, 14)
    edges = [[draw.randrange(count) for _ in range(draw.choice((0, 0, 1, 1, 2)))] for _ in range(count)]
    return Heap(edges, {i for i in range(count) if draw.random() < 0.1})


def test_ranks_cycles_and_ways_are_those_of_a_naive_model():
    for seed in range(300):
        check_against_a_naive_model(random_heap(seed))


def check_against_a_naive_model(heap):
    ways, edges, count = _ways.Ways(heap, None), heap.edges, len(heap.edges)
    hidden = heap.unseen | reachable(edges, heap.unseen)
    behind = [reachable(edges, [i]) for i in range(count)]
    in_cycle = {i for i in range(count) if i in behind[i] and i not in hidden}
    same = {i: {j for j in in_cycle if j in behind[i] and i in behind[j]} for i in in_cycle}
    begin = {
        i
        for i in in_cycle
        if type(heap.things[i + 3]) is not dict or all(type(heap.things[j + 3]) is dict for j in same[i])
    }
    garbage = (begin | reachable(edges, begin)) - hidden
    for i in range(count):
        expected = "hidden" if i in hidden else "cycle" if i in garbage else "none"
        assert ways.rank(i + 3) == expected
        chain = [place - 3 for place in ways.chain(i + 3)]
        assert all(to in edges[at] for at, to in itertools.pairwise(chain))
        if expected != "none":
            assert chain[0] in (heap.unseen if expected == "hidden" else begin)
        assert (ways.cycle_number(i + 3) >= 0) == (i in in_cycle)
        if i in in_cycle:
            cycle = [place - 3 for place in ways.cycle(i + 3)]
            assert cycle[0] == i and i in edges[cycle[-1]] and set(cycle) <= same[i]
            assert all(to in edges[at] for at, to in itertools.pairwise(cycle))
    assert len({ways.cycle_number(i + 3) for i in in_cycle}) == len({frozenset(same[i]) for i in in_cycle})
    assert ways.rank(2) == "root" and ways.chain(2) == [0, 1, 2] and ways.cycle_number(2) == -1


def test_a_long_way_loses_its_middle_and_knows_how_much():
    heap = Heap([], set(), reached=3)
    heap.things, heap.parents, heap.reached = [None] * 100, list(range(-1, 99)), 10**9
    ways = _ways.Ways(heap, None)
    chain = ways.chain(99)
    assert chain == [*range(_ways.HEAD), _ways.LEFT_OUT, *range(100 - _ways.TAIL, 100)]
    assert ways.depth(99) == 99 and ways.chain(18) == list(range(19))


def test_the_search_itself_is_not_among_the_holders():
    heap = _heap.Heap({}, ignored=[KEPT])
    KEPT.append(torch.ones(3))
    heap.add_roots([KEPT, [KEPT]])
    heap.explore()
    assert len(heap.things) == 1 and heap.native["tensor"] == []
