"""Growth from step to step: counted to the byte, and said who holds it."""

import collections
import copy
import random

import numpy as np
import pytest
import torch
from support.leaks import collects
from torch import nn

from zbpipe._torch import allocator  # memory that is not the CPU allocator's, as CUDA's, without CUDA
from zbpipe.leaks import Growth, _growth  # how long its looks take
from zbpipe.leaks._search import natives_now  # one of its looks
from zbpipe.leaks._verdict import enough, rises  # rows of a hundred thousand steps

KEPT = []
SEEN = None


def grow(step, count=6):
    """What grew in so many steps, and the table."""
    with Growth() as growth:
        for _ in range(count):
            step()
            growth.step()
        return growth, growth.grown(), growth.table()


def test_growth_that_cannot_begin_leaves_the_collector_on(monkeypatch):
    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(allocator, "is_in_use", fail)
    with pytest.raises(ZeroDivisionError) as raised:
        Growth()
    assert collects(), raised  # which keeps what was begun


def test_growth_counts_and_names_what_grows():
    with Growth() as growth:
        for _ in range(5):
            KEPT.append(torch.ones(2))
            (torch.ones(8, requires_grad=True) * 2).sum().backward()
            growth.step()
        assert growth.counts == [1, 2, 3, 4, 5] and growth.bytes == [8, 16, 24, 32, 40]
        (grown,) = growth.grown()
        table = growth.table()
    assert grown.steps == [2, 3, 4] and grown.bytes == 24
    head = "  3 tensors (24 bytes) from steps 2 to 4, held by a list that was never cleared:"
    assert f"{head}\n    >> module global {__name__}.KEPT (" in table
    assert "\n       list items 1 to 3\n       Tensor float32 [2]" in table
    assert collects()
    with pytest.raises(RuntimeError, match="after close"):
        growth.step()


def test_what_no_place_explains_is_said_with_its_numbers():
    gone = []
    with Growth() as growth:
        for _ in range(12):
            gone.append(torch.ones(2))
            KEPT.append(torch.ones(4))
            growth.step()
        gone.clear()
        told, (*_, rest) = growth.grown()[0], growth.grown()
    assert told.held_by[0].startswith(f">> module global {__name__}.KEPT (")
    assert told.bytes == 10 * 16 and rest.leaks == []
    said = "memory that none of the tensors explains, 6 more tensors since step 6, 48 more bytes since step 6:"
    assert str(rest) == f"{said}\n    nobody that can be seen"


@pytest.mark.parametrize("most", [5, None])
def test_a_full_queue_hides_nothing_that_grows_beside_it(most):
    queue, held = collections.deque(maxlen=most), {"larger": torch.ones(0)}

    def step():
        queue.append(torch.ones(256))
        if len(queue) > 5:
            queue.popleft()
        held["larger"] = torch.cat([held["larger"], torch.ones(256)])

    _, (grown, *_), _ = grow(step, 40)
    assert grown.is_larger and grown.held_by[0].lstrip(" >").startswith("variable held of ")


def keeping(kept, what=lambda: torch.ones(4), let_go=lambda kept: None):
    """A step that lets go of something and keeps something."""
    KEPT.append(kept)

    def step():
        let_go(kept)
        kept.append(what())

    return step


def window_of(length, what=lambda: torch.ones(5)):
    return keeping(collections.deque(maxlen=length), what)


def window_of_any_size():
    sizes = random.Random(0)
    return window_of(6, lambda: torch.ones(sizes.randrange(1, 200)))


def list_that_is_cleared_each(steps):
    return keeping([], let_go=lambda kept: len(kept) == steps and kept.clear())


def cache_that_forgets_any():
    choice = random.Random(0)
    return keeping([], let_go=lambda kept: len(kept) > 8 and kept.pop(choice.randrange(8)))


def buffers_in_turns(number):
    return keeping([None] * number, let_go=lambda kept: kept.pop(0))


def list_that_is_filled_once():
    return lambda: len(KEPT) < 8 and KEPT.append(torch.ones(4))


STEADY = {
    "window": (lambda: window_of(10), 12),
    "window of any size": (window_of_any_size, 14),
    "list cleared each epoch": (lambda: list_that_is_cleared_each(8), 9),
    "two buffers": (lambda: buffers_in_turns(2), 4),
    "three buffers": (lambda: buffers_in_turns(3), 6),
    "cache": (cache_that_forgets_any, 17),
    "list filled once": (list_that_is_filled_once, 16),
}


@pytest.mark.parametrize("name", STEADY)
def test_what_lets_go_again_does_not_grow_whenever_it_is_looked_at(name):
    make, from_step = STEADY[name]
    step = make()
    with Growth() as growth:
        for number in range(1, 45):
            step()
            growth.step()
            if number in (from_step, from_step + 1, 23, 32, 44):  # a search each time
                assert growth.grown() == [], number


def of_every_second_step():
    turns = iter(range(1000))
    return lambda: next(turns) % 2 or KEPT.append(torch.ones(4))


@pytest.mark.parametrize(
    ("beside", "leak", "within"),
    [
        (lambda: lambda: None, lambda: lambda: KEPT.append(torch.ones(4)), 4),
        (lambda: lambda: None, of_every_second_step, 6),
        (lambda: buffers_in_turns(2), lambda: lambda: KEPT.append(torch.ones(4)), 6),
        (lambda: buffers_in_turns(2), of_every_second_step, 10),  # two things at one place, of which one goes
        (lambda: window_of(10), lambda: lambda: KEPT.append(torch.ones(4)), 4),
        (lambda: window_of(10), of_every_second_step, 20),
    ],
)
def test_a_leak_is_found_within_few_steps_and_stays_found(beside, leak, within):
    steady, growing = beside(), leak()
    with Growth() as growth:
        for number in range(1, 45):
            steady()
            growing()
            growth.step()
            if number in (within, within + 1, 21, 32, 44):
                (group,) = [group for group in growth.grown() if "deque" not in str(group.held_by)]
                assert "KEPT" in group.held_by[0]


class Link:
    def __init__(self, before):
        self.before, self.value = before, torch.ones(2)


def link_each():
    KEPT[:] = [Link(KEPT[0] if KEPT else None)]


OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1)


def state_of_parameters_that_are_gone():
    OPTIMIZER.state[nn.Parameter(torch.ones(4))] = {"momentum": torch.ones(4)}


@pytest.mark.parametrize(
    ("step", "size", "held_by"),
    [
        (link_each, 8, ["attribute value of", "Link"]),
        (state_of_parameters_that_are_gone, 16, ["attribute state of torch.optim.sgd.SGD"]),
    ],
)
def test_what_grows_though_each_chain_is_another(step, size, held_by):
    _, grown, table = grow(step, 8)
    OPTIMIZER.state.clear()
    assert {leak.bytes for group in grown for leak in group.leaks} == {size}
    assert sorted({number for group in grown for number in group.steps}) == [2, 3, 4, 5, 6, 7]
    assert [words for words in held_by if words not in table] == []


def test_a_tensor_that_each_step_replaces_by_a_larger_one_is_named():
    global SEEN
    SEEN = torch.empty(0, 4)
    with Growth() as growth:
        for _ in range(12):
            SEEN = torch.cat([SEEN, torch.ones(2, 4)])
            growth.step()
        (group,) = growth.grown()
        assert group.is_larger and group.bytes == SEEN.nbytes
        assert group.held_by[0].startswith(f">> module global {__name__}.SEEN (")
        assert "1 tensor (384 bytes), larger than any of earlier steps:" in growth.table()
        for _ in range(12):  # as many steps again, and no more
            growth.step()
        assert growth.grown() == []


def test_a_variable_that_is_the_sum_is_named():
    weight, total = torch.ones(1, requires_grad=True), torch.zeros(())
    with Growth() as growth:
        for _ in range(12):
            total = total + weight.sum()
            growth.step()
        (group,) = growth.grown()
    assert group.nodes > 10 and group.held_by[0].startswith(">> variable total of test_a_variable_that"), total


def test_nodes_that_rose_at_the_last_look_rise_until_the_next():
    """Between looks the number of nodes is that of the look before."""
    with Growth() as growth:
        looks = []
        for step in range(1, 16):
            growth.step()
            looks += [step] if growth.looked_at == step else []
    assert looks == [1, 2, 3, 4, 6, 9, 14]
    growth.nodes = [10, 20, 30, 40, 40, 60, 60, 60, 90, 90, 90, 90, 90, 120, 120]
    assert growth.rising() == ["nodes"]
    growth.nodes[13:] = [90] * 2
    assert growth.rising() == []


def of_other_memory(value):
    """On memory that torch's allocator does not know, as CUDA's."""
    return torch.frombuffer(bytearray(8), dtype=torch.float32).fill_(value)


def test_other_memory_is_counted_by_its_storages_and_by_the_steps_that_made_them(monkeypatch):
    monkeypatch.setattr(allocator, "is_in_use", lambda: True)
    older = of_other_memory(0)
    KEPT.append(older)

    def step():
        of_other_memory(1)
        KEPT.append(of_other_memory(2))

    growth, (grown,), table = grow(step)
    assert growth.counts == [1, 2, 3, 4, 5, 6] and growth.bytes == [8, 16, 24, 32, 40, 48]
    assert grown.steps == [2, 3, 4, 5] and grown.bytes == 32
    assert f"module global {__name__}.KEPT" in table


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize(
    "make",
    [
        lambda: copy.deepcopy({"weight": torch.ones(5)}),
        lambda: torch.from_numpy(np.ones(5, np.float32)),
        lambda: torch.UntypedStorage(20),
    ],
    ids=["deepcopy", "numpy", "storage"],
)
@pytest.mark.parametrize("is_slow", [False, True])
def test_memory_that_goes_past_the_allocator_grows(make, every, is_slow, monkeypatch):
    kept, looks = [], []
    monkeypatch.setattr(_growth, "perf_counter", lambda: 100.0 * len(looks) if is_slow else 0.0)
    with Growth() as growth:
        monkeypatch.setattr(_growth, "natives_now", lambda: looks.append(1) or natives_now())
        for number in range(60):
            if number % every == 0:
                kept.append(make())
            growth.step()
        assert len(looks) == (10 if is_slow else 60)
        (group,) = growth.grown()
        assert len(group.leaks) > 40 // every
        assert "variable kept of " in next(line for line in group.held_by if line.startswith(">>"))


def test_other_memory_that_comes_into_use_between_two_looks_is_counted_from_there(monkeypatch):
    monkeypatch.setattr(allocator, "is_in_use", lambda: bool(KEPT))
    numbers = iter(range(1, 11))
    growth, _, _ = grow(lambda: next(numbers) > 6 and KEPT.append(of_other_memory(2)), 10)
    assert growth.counts == [0] * 6 + [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (range(8), True),
        (range(4), True),
        (range(3), False),  # too few
        ([5] * 60, False),
        ([5] * 40 + [9] * 20, False),  # one jump
        ([5] * 35 + [7] * 10 + [9] * 15, False),
        ([(i * 7919) % 101 for i in range(200)], False),
        ([i * 20 + (i * 7919) % 101 for i in range(200)], True),
        ([i // 30 for i in range(400)], True),
        ([i + 29 * (i == 23) for i in range(38)], True),  # a peak in one step
        ([max(i - 20, 0) for i in range(40)], True),
        ([min(i, 10) for i in range(14)], False),  # a window that is full
        (range(60, 0, -1), False),
        ([i % 20 for i in range(400)], False),  # by length, epoch after epoch
        (range(100_000), True),
        ([max(i - 25, 0) for i in range(40)], True),
        ([max(i - 35, 0) for i in range(40)], False),
        ([(i + 2) % 20 for i in range(2, 40)], False),  # the second epoch, higher by what the warm-up had of the first
    ],
)
def test_what_rises(values, expected):
    assert (rises(list(values)) >= enough(len(values))) == expected


@pytest.mark.cuda
def test_growth_on_cuda():
    KEPT.append(torch.ones(1, device="cuda"))
    growth, (grown,), table = grow(lambda: KEPT.append(torch.ones(100, device="cuda")))
    assert growth.bytes == [400 * n for n in range(1, 7)]
    assert grown.steps == [2, 3, 4, 5] and "on cuda:0" in str(grown.leaks[0]) and "KEPT" in table
