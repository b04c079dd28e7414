"""Holders that only their own kind's rules find, and which of a chain is to blame."""

import concurrent.futures
import contextvars
import inspect
import types
import unittest.mock

import numpy as np
import pytest
import torch
from support.checks import checked

KEPT = []


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    KEPT.clear()


def texts(chain):
    return [holder.text for holder in chain]


# ---- what is kept by other means than references


CONTEXT = contextvars.ContextVar("cache", default=None)


class Finalized(np.ndarray):
    def __array_finalize__(self, obj):
        if obj is not None and type(obj) is Finalized:
            pytest.fail("its code ran")

    base = property(lambda self: pytest.fail("its code ran"))
    dtype = property(lambda self: pytest.fail("its code ran"))


def of_objects():
    array = np.empty((2, 3), dtype=object)
    array[1, 2] = torch.ones(4)
    return array


def of_fields():
    array = np.zeros(3, dtype=[("x", "i1"), ("p", [("q", "O"), ("r", "O", (2,))])])
    array["p"]["r"][1, 1] = torch.ones(4)
    return array


def backwards():
    array = np.empty((4, 6), dtype=object)[::2, ::-2]
    array[1, 1] = torch.ones(4)
    return array


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (of_objects, ["an item of a numpy array"]),
        (of_fields, ["an item of a numpy array"]),
        (backwards, ["an item of a numpy array"] * 2),  # the view is on the array that has them
        (lambda: np.empty((0, 3), dtype=object), None),
        (
            lambda: np.ma.masked_array(torch.ones(4).numpy()),
            ["a numpy.ma.MaskedArray (a numpy array) on its memory", "a numpy array on its memory"],
        ),
        (
            lambda: torch.ones(4).numpy().view(Finalized),
            [f"a {__name__}.Finalized (a numpy array) on its memory", "a numpy array on its memory"],
        ),
        (lambda: torch.utils.dlpack.to_dlpack(torch.ones(4)), ["a DLPack capsule on its memory"]),
        (lambda: torch.ones(4).__dlpack__(max_version=(1, 0)), ["a DLPack capsule on its memory"]),
        (
            lambda: np.from_dlpack(torch.ones(4)),
            ["a numpy array on its memory", "a DLPack capsule on its memory"],
        ),
    ],
)
def test_arrays_and_capsules(make, expected):
    report = checked(lambda: KEPT.append(make()))
    if expected is None:
        assert report.leaks == []
        return
    (leak,) = report.leaks
    if make is backwards:
        expected = expected[: len(leak.chain) - 3]
    assert texts(leak.chain)[1:] == ["list item 0", *expected, "Tensor float32 [4]"]


def test_a_context_variable():
    token = None

    def keep():
        nonlocal token
        token = CONTEXT.set(torch.ones(4))

    report = checked(keep)
    CONTEXT.reset(token)
    (leak,) = report.leaks
    assert texts(leak.chain) == ["context variable cache", "Tensor float32 [4]"]


def test_a_storage_in_a_list_says_which_item():
    (leak,) = checked(lambda: KEPT.append(torch.ones(4).untyped_storage())).leaks
    assert texts(leak.chain)[1:] == ["list item 0", "a storage that Python holds"]


def test_tensors_that_hold_each_other_by_attributes():
    def each_other():
        a, b = torch.ones(4), torch.ones(4)
        a.other, b.other = b, a

    report = checked(each_other)
    assert [texts(leak.chain) for leak in report.leaks] == [["attribute other of the tensor", "Tensor float32 [4]"]] * 2


# ---- who is to blame


def one_to_blame(keep):
    (leak,) = checked(keep).leaks
    return leak.blame


def test_the_standard_library_is_passed_over():
    def future():
        future = concurrent.futures.Future()
        future.set_result(torch.ones(4))
        return future

    for make in (
        future,
        lambda: types.SimpleNamespace(x=torch.ones(4)),
        lambda: unittest.mock.Mock(return_value=torch.ones(4)),
        lambda: torch.optim.SGD([torch.ones(4)], lr=0.1),
    ):
        blame = one_to_blame(lambda make=make: KEPT.append(make()))
        assert "KEPT" in blame.text and not blame.is_library, blame
        KEPT.clear()


def test_a_cycles_member_is_to_blame_and_no_caller():
    def in_a_frame():
        frame = inspect.currentframe()
        tensor = torch.ones(4)
        return frame and tensor.sum() and None

    (leak,) = [leak for leak in checked(in_a_frame).leaks if leak.shape == (4,)]
    assert "in_a_frame" in leak.blame.text and leak.in_cycle >= 1


def test_of_a_cycle_through_torchs_classes_the_programs_hook_is_to_blame():
    """The nearest to the weight is torch's Linear, which is as innocent as the weight."""

    def fused():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False))

        def update(weight):
            model.zero_grad()

        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(update)

    report = checked(fused)
    (leak,) = report.leaks
    assert leak.blame.text.endswith("fused.<locals>.update") and leak.blame.kind in ("hook", "cell"), report
    assert leak.in_cycle > 1 and texts(leak.chain)[-1] == "Parameter float32 [4, 4]"


def test_files_of_libraries_are_named_as_they_are_imported():
    report = checked(lambda: KEPT.append(torch.optim.SGD([torch.ones(4)], lr=0.1)))
    places = [holder.where for holder in report.leaks[0].chain if holder.is_library]
    assert places and all(place.startswith("torch/optim/") for place in places), report
