"""A plugin for pytest (-p support.late_default): what tests make, they make on the device that runs late.

Each weight pass is called on a stream of its own, and nobody waits for anybody: that is the weight pass's business.
"""

import functools

import pytest
import torch

import zbpipe
from support import late

# What these tests ask is not asked of a device: reason -> parts of their names.
NOT_OF_A_DEVICE = {
    "bits and temporaries are the CPU's": (
        "test_bits.py",
        "test_fused_accumulation",
        "test_autocast_needs_the_temporaries",
        "test_product_is_added_to_the_gradient_that_is_there",
        "test_product_that_could_not_be_computed",
        "test_fused_products_are_added_to_a_wider",
        "test_by_default_a_product_is_rounded",
        "test_fused_into_a_grad_of_a_wider",
    ),
    "it counts the CPU's memory or calls": (
        "test_size.py",
        "test_what_nodes_behind_a_split_node_have_saved",
        "test_profiler.py",
    ),
    "it expects the words 'on cpu'": (
        "a gradient on another device",
        "test_weight_that_has_been_moved_into_the_interior",
        "test_main_grad_that_does_not_fit",
        "test_bad_arguments_are_refused_before",
    ),
    "its module or tensor was made on the CPU": (
        "test_strides_of_dinputs",
        "test_group_read_on_another_thread",
        "test_weights_stepped_in_place_between",
        "test_work_for_weights_that_nobody_names",
        "pickled",
    ),
    "the CPU has no kernel for it": ("[lstm", "[gru", "recurrent", "[sparse gradient"),
    "torch warns elsewhere": ("test_warning_made_an_error_in_the_weight_pass",),
}


def pytest_collection_modifyitems(items):
    for item in items:
        for reason, names in NOT_OF_A_DEVICE.items():
            if any(name in item.nodeid for name in names):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _on_the_late_device(monkeypatch):
    plain = zbpipe.stage_backward_weight

    @functools.wraps(plain)
    def on_a_stream_of_its_own(*args, **kwargs):
        with late.stream(torch.accelerator.current_device_index()):
            return plain(*args, **kwargs)

    monkeypatch.setattr(zbpipe, "stage_backward_weight", on_a_stream_of_its_own)
    late.begin("others_first")
    torch.set_default_device("late")
    yield
    torch.set_default_device(None)
    found = late.races()
    late.finish()
    assert not found, found
