"""What groups hold, against sizes computed by hand."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import zbpipe
from zbpipe import memory

N = 8


def groups_of(net, x, outputs=lambda y: [y]):
    x = x.clone().requires_grad_()
    out = outputs(net(x))
    return zbpipe.stage_backward_input(out, [torch.ones_like(y) for y in out], [x], list(net.parameters()))[1]


def mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4), nn.LayerNorm(4))


def test_a_stack_of_layers():
    net = mlp()
    held = memory.held(groups_of(net, torch.randn(N, 4)), net)
    x, hidden = N * 4 * 4, N * 16 * 4
    both = x + hidden
    assert held.bytes == 2 * both + 2 * 4 * 4
    assert held.by_role == {"matrix": both, "output gradient": both, "light gradient": 32}
    # A bias has its output gradient.
    sizes = {"0.weight": both, "2.weight": both, "0.bias": hidden, "2.bias": x, "3.weight": 16, "3.bias": 16}
    assert held.by_parameter == sizes
    assert held.by_module == {"": held.bytes, "0": both, "2": both, "3": 32}
    alone = {row.name: row.alone for row in held.parameters}
    assert alone == {"0.weight": x, "0.bias": 0, "2.weight": hidden, "2.bias": 0, "3.weight": 16, "3.bias": 16}
    assert (held.groups, held.spent, held.incomplete) == (3, 0, "")
    rows = [line.split()[0] for line in str(held).splitlines() if "[" in line]
    assert len(rows) == 6 and "[16, 4]" in str(held)
    assert {"0.weight", "2.weight"} == set(rows[:2]), "the most first"


def test_a_storage_that_several_hold_counts_once():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x):
            h = x.tanh()
            return self.a(h) + self.b(h)

    net = Two()
    groups = groups_of(net, torch.randn(N, 4))
    held = memory.held(groups, net)
    size = N * 4 * 4
    assert [group.bytes_held for group in groups] == [memory.held(group).bytes for group in groups] == [2 * size] * 2
    assert held.bytes == 2 * size, "both read one X, and one dY"
    assert held.by_parameter == {"a.weight": 2 * size, "b.weight": 2 * size}
    assert [row.alone for row in held.parameters] == [0, 0]
    assert held.by_module == {"": 2 * size, "a": 2 * size, "b": 2 * size}
    assert all(storage.parameters == ("a.weight", "b.weight") for storage in held.storages)


def test_kinds_of_tensors():
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 3, bias=False)
            self.table = nn.Parameter(torch.randn(3, 6))  # a matrix behind a node that runs whole
            self.late = nn.Parameter(torch.randn(3, 6))

        def forward(self, x):
            return self.conv(x) * self.table, self.late * 2.0

    net = Parts()
    held = memory.held(groups_of(net, torch.randn(N, 2, 8), outputs=list), net)
    roles = {
        name: {role for storage in held.storages if storage.parameters[0] == name for role in storage.roles}
        for name in ("conv.weight", "table", "late")
    }
    run_again = {"output gradient", "saved"}  # of `late` the factor 2.0
    assert roles == {"conv.weight": run_again, "table": {"kept gradient"}, "late": run_again}
    assert held.by_parameter["table"] == 3 * 6 * 4
    assert {"ConvolutionBackward0", "MulBackward0"} <= {node for storage in held.storages for node in storage.nodes}
    (late,) = (s for s in held.storages if s.parameters == ("late",) and s.roles == ("output gradient",))
    assert (late.bytes, late.dtype, late.device.type, late.shapes) == (72, torch.float32, "cpu", ((3, 6),))


def test_weights_behind_other_nodes_and_unknown_ones():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return x @ (self.a * 2.0 + self.b.sin())

    net = Masked()
    groups = groups_of(net, torch.randn(N, 4))
    held = memory.held(groups, net)
    assert set(held.by_parameter) == {"a", "b"}
    assert held.by_parameter["a"] == held.bytes
    for others in (None, mlp()):
        assert list(memory.held(groups, others).by_parameter) == ["float32[4, 4] #0", "float32[4, 4] #1"]
        assert memory.held(groups, others).by_module == {}


def test_tied_parameters_count_for_both_modules():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    first, second = groups_of(net, torch.randn(N, 4)), groups_of(net, torch.randn(2 * N, 4))
    held = memory.held(first, net)
    assert held.by_parameter == {"0.weight": held.bytes}
    assert held.by_module == {"": held.bytes, "0": held.bytes, "2": held.bytes}
    both = memory.held(first + second, net)
    assert both.bytes == 3 * held.bytes, "of another microbatch, twice as long"
    assert both.by_parameter == {"0.weight": 3 * held.bytes}


def test_spent_groups_hold_nothing():
    net = mlp()
    groups = groups_of(net, torch.randn(N, 4))
    zbpipe.stage_backward_weight(net.parameters(), groups[:1])
    left = memory.held(groups, net)
    assert (left.spent, left.groups) == (1, 3)
    assert left.bytes == sum(group.bytes_held for group in groups[1:])
    assert "1 of them spent" in str(left)
    zbpipe.stage_backward_weight(net.parameters(), groups[1:])
    assert memory.held(groups, net).bytes == 0
    assert memory.held([]).bytes == 0
    assert str(memory.held([]))


def test_what_a_failed_weight_pass_could_not_add_is_held():
    net = nn.Sequential(nn.Linear(4, 4, bias=False))
    groups = groups_of(net, torch.randn(N, 4))

    def fail(_):
        raise KeyError("planted")

    handle = net[0].weight.register_hook(fail)
    with pytest.raises(Exception, match="planted"):
        zbpipe.stage_backward_weight(net.parameters(), groups)
    assert memory.held(groups, net).by_role["waiting gradient"] == 4 * 4 * 4
    handle.remove()
    zbpipe.stage_backward_weight(net.parameters(), groups)
    assert memory.held(groups).bytes == 0


def test_what_others_hold_too_is_held():
    net, x = nn.Linear(4, 4), torch.randn(N, 4, requires_grad=True)
    groups = zbpipe.stage_backward_input([net(x)], [torch.randn(N, 4)], [x], net.parameters())[1]
    assert memory.held(groups, net).bytes == 2 * N * 4 * 4


@pytest.mark.parametrize("bad", [[3], [None], [{"a": 1}], ["group"]])
def test_what_is_no_group_is_refused(bad):
    with pytest.raises(TypeError, match=r"groups\[0\] is a"):
        memory.held(bad)


class Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w.sum()

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(4, 4).to_sparse()


def test_a_sparse_gradient_is_not_counted_which_is_said():
    w, x = nn.Parameter(torch.ones(4, 4)), torch.ones(N, requires_grad=True)
    groups = zbpipe.stage_backward_input([Sparse.apply(x, w)], [torch.ones(N)], [x], [w])[1]
    held = memory.held(groups)
    assert (held.bytes, held.by_parameter) == (0, {"float32[4, 4] #0": 0})
    assert "incomplete: tensors without a storage of their own, such as sparse ones, are not counted" in str(held)


def test_counting_unpacks_nothing_and_is_the_same_on_any_thread():
    unpacked = []

    def unpack(t):
        unpacked.append(1)
        return t

    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Conv1d(3, 2, 3))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        groups = groups_of(net, torch.randn(N, 2, 16))
    before = len(unpacked)
    held = memory.held(groups, net)
    assert held.bytes > 0 and len(unpacked) == before > 0
    with ThreadPoolExecutor() as pool:
        assert pool.submit(memory.held, groups, net).result() == held
