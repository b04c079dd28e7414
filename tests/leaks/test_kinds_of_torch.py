"""Kinds of leaks in numpy and torch, each with the holder that is to be named first."""

import copy
import ctypes
import re

import numpy as np
import pytest
import torch
from support.checks import checked
from torch import nn
from torch.nn.utils import parametrize

KEPT = []
BYTES = 28
PLACE = f"module global {__name__}.KEPT"


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    KEPT.clear()


def made():
    return torch.ones(7)


def graph():
    return (torch.ones(7, requires_grad=True) * 2).exp()


# ---- of numpy and buffers


def matrix():
    return made().numpy().view(np.matrix)


def record_array():
    return torch.ones(7).numpy().view(np.recarray)


def buffer_of_numpy():
    return np.frombuffer(memoryview(made().numpy()), dtype=np.float32)


def of_torch_from_buffer():
    return torch.frombuffer(memoryview(made().numpy()), dtype=torch.float32)


def of_ctypes_buffer():
    return (ctypes.c_float * 7).from_buffer(memoryview(made().numpy()))


# ---- of torch


class WithCache(nn.Module):
    def forward(self, x):
        return x * 2


def parametrization():
    layer = nn.Linear(7, 1, bias=False)
    parametrize.register_parametrization(layer, "weight", WithCache())
    with parametrize.cached():
        assert layer.weight is not None
        KEPT.append(dict(parametrize._cache))
    return layer


def constants_of_fx():
    tensor = made()

    class Module(nn.Module):
        def forward(self, x):
            return x + tensor

    return torch.fx.symbolic_trace(Module())


def jagged():
    return torch.nested.nested_tensor_from_jagged(made(), torch.tensor([0, 3, 7]))


def retained():
    x = graph()
    x.retain_grad()
    x.sum().backward()
    return x.grad


def of_a_subclass():
    class Mine(torch.Tensor):
        pass

    return made().as_subclass(Mine)


def in_a_buffer():
    layer = nn.Module()
    layer.register_buffer("seen", made())
    return layer


def in_a_buffer_that_is_not_saved():
    layer = nn.BatchNorm1d(7, affine=False)
    layer.num_batches_tracked = None
    return layer


def full_hook():
    tensor = made()
    layer = nn.Linear(1, 1)
    layer.register_full_backward_hook(lambda module, into, out: tensor)
    return layer


def hook_of_a_state_dict():
    tensor = made()
    layer = nn.Linear(1, 1)
    layer._register_state_dict_hook(lambda *given: tensor)
    return layer


def saved_by_hooks():
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor, made()), lambda packed: packed[0]):
        return torch.ones(1, requires_grad=True).exp()


def grads_of_an_accumulator():
    weight = torch.ones(1, requires_grad=True)
    tensor = made()
    weight.register_post_accumulate_grad_hook(lambda weight: tensor)
    return weight


def generator_of_a_sampler():
    return iter([made()] * 2)


def dataset():
    return torch.utils.data.TensorDataset(made())


class Rows:
    def __init__(self):
        self.tensors = made()


def loader():
    return iter(torch.utils.data.DataLoader(Rows(), batch_sampler=[[0]]))


def scheduler():
    optimizer = torch.optim.SGD([nn.Parameter(made())], lr=0.1)
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def history_of_lbfgs():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.LBFGS([weight])
    optimizer.state[weight]["prev_flat_grad"] = made()
    return optimizer


def exponential():
    return torch.optim.swa_utils.AveragedModel(nn.Linear(7, 1, bias=False))


def best():
    return copy.deepcopy(nn.Linear(7, 1, bias=False).state_dict())


def view():
    return made()[:2]


def typed():
    return made().storage()


def conjugate():
    return torch.ones(7, dtype=torch.complex64).real.sum().new_ones(7).conj()


def of_anomaly():
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly(check_nan=False):
        return graph()


KINDS = {
    "matrix": (matrix, PLACE),
    "record array": (record_array, PLACE),
    "numpy over a memoryview": (buffer_of_numpy, PLACE),
    "ctypes over a memoryview": (of_ctypes_buffer, PLACE),
    "torch over a memoryview": (of_torch_from_buffer, PLACE),
    "parametrization": (parametrization, PLACE),
    "constant of fx": (constants_of_fx, PLACE),
    "jagged": (jagged, PLACE),
    "gradient": (retained, PLACE),
    "subclass": (of_a_subclass, PLACE),
    "buffer": (in_a_buffer, PLACE),
    "statistics": (in_a_buffer_that_is_not_saved, PLACE),
    "full backward hook": (full_hook, "closure variable tensor of .*full_hook"),
    "hook of state_dict": (hook_of_a_state_dict, "closure variable tensor of .*hook_of_a_state_dict"),
    "pack hook": (saved_by_hooks, PLACE),
    "hook after accumulation": (grads_of_an_accumulator, "post-accumulate hook .*grads_of_an_accumulator"),
    "iterator": (generator_of_a_sampler, PLACE),
    "dataset": (dataset, PLACE),
    "loader": (loader, "attribute tensors of .*Rows"),
    "schedule of rates": (scheduler, PLACE),
    "history of LBFGS": (history_of_lbfgs, PLACE),
    "averaged model": (exponential, PLACE),
    "best state": (best, PLACE),
    "view": (view, PLACE),
    "typed storage": (typed, PLACE),
    "conjugate": (conjugate, PLACE),
    "anomaly mode": (of_anomaly, PLACE),
    "graph": (graph, PLACE),
    "list of losses": (lambda: [graph().sum() for _ in range(3)], PLACE),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning", "ignore:TypedStorage")
def test_the_first_is_to_blame(kind):
    make, expected = KINDS[kind]
    report = checked(lambda: KEPT.append(make()))
    leaks = [leak for leak in report.leaks if leak.bytes >= BYTES]
    assert leaks, report
    assert re.match(expected, leaks[0].blame.text), report
    assert not leaks[0].blame.is_library
    assert report.notes == []
