"""Whom a chain begins with, and how many leaks are told at once."""

import torch
from torch import nn

from zbpipe.leaks import Growth, find_holders

KEPT = []


class Trainer:
    def __init__(self):
        self.weight = nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, momentum=0.9)


def test_a_librarys_running_frame_comes_after_the_programs_place():
    """A variable of torch's wrapper of step() is the optimizer, and much nearer."""
    found = []

    def closure():
        found.append(find_holders(KEPT[0]["trainer"].optimizer.state[KEPT[0]["trainer"].weight]["momentum_buffer"]))
        return torch.ones(())

    KEPT.append({"trainer": Trainer()})
    KEPT[0]["trainer"].weight.grad = torch.ones(3)
    KEPT[0]["trainer"].optimizer.step()
    KEPT[0]["trainer"].optimizer.step(closure)
    KEPT.clear()
    texts = [holder.text for holder in found[0].chain]
    assert texts[:3] == [f"module global {__name__}.KEPT", "list item 0", "dict item 'trainer'"], texts
    assert found[0].blame.text == f"attribute optimizer of {__name__}.Trainer"


def test_nodes_that_rose_at_the_last_look_rise_until_the_next():
    """Between looks the number of nodes is that of the look before."""
    with Growth() as growth:
        looks = []
        for step in range(1, 16):
            growth.step()
            looks += [step] if growth.looked_at == step else []
    assert looks == [1, 2, 3, 4, 6, 9, 14]
    growth.nodes, growth.looked_at = [10, 20, 30, 40, 40, 60, 60, 60, 90, 90, 90, 90], 9
    assert growth.rising() == ["nodes"]
    growth.nodes[8:] = [60] * 4
    assert growth.rising() == []
