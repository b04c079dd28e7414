"""A plugin for pytest (-p support.on_device): what tests make, they make on the device that ZBPIPE_DEVICE names.

"late" is the device of support/late.py, "cuda" a GPU. On "cpu" the tests that a GPU is asked run as everywhere else: a
rehearsal of `make gpu`. On a device each weight pass is called on a stream of its own, and nobody waits for anybody: that
is the weight pass's business.
"""

import functools
import importlib
import os

import pytest
import torch

import zbpipe
from support import rounding

DEVICE = os.environ.get("ZBPIPE_DEVICE", "cpu")
late = importlib.import_module("support.late") if DEVICE == "late" else None

# What these tests ask is not asked of a device: reason -> parts of their names.
NOT_OF_A_DEVICE = {
    "bits and temporaries are the CPU's": (
        "test_bits.py",
        "test_dense.py",
        "test_wrong_last_bit_is_found",
        "test_wrong_gradients_in_the_input_pass_are_found[input's",
        "test_fused_accumulation",
        "test_autocast_needs_the_temporaries",
        "test_product_is_added_to_the_gradient_that_is_there",
        "test_product_that_could_not_be_computed",
        "test_fused_products_are_added_to_a_wider",
        "test_fused_into_a_grad_of_a_wider",
        "test_a_mode_sees_every_operator_of_a_product",
    ),
    "it counts the CPU's memory or calls": (
        "test_copies.py",
        "test_flat.py",
        "test_floor.py",
        "test_cycles.py",
        "test_what_the_input_pass_computes_again",
        "test_size.py",
        "test_what_nodes_behind_a_split_node_have_saved",
        "test_profiler.py",
        "test_memory_of_both_passes",
        "test_held.py::test_nothing_is_leaked",
        "test_profile_of_a_block",
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
        "compile/test_split.py",
        "test_weights_given_by_hand_restrict_even_within",
        "that_has_no_storage",
        "test_kept_by_the_local_tensor",
        "test_limit_memory_that_is_written_unseen[numpy",
        "test_backwards_of_other_threads_and_later",
    ),
    "its mesh is of the CPU": (
        "test_gradients_summed_over_steps_that",
        "test_the_weights_in_the_graph_sum_their_gradients",
    ),
    "torch warns elsewhere": ("test_warning_made_an_error_is_printed",),
    "its processes know of no device": ("test_fork.py", "test_interpreters.py", "test_environment_variable"),
}
NOT_OF_THE_LATE_DEVICE = {
    "the CPU has no kernel for it": (
        "[lstm",
        "[gru",
        "recurrent",
        "_sparse_",
        "[sparse gradient",
        "a matrix in CSR",
        "test_warning_made_an_error_among",
    ),
    "torch has no autocast for it": (
        "test_dtypes_and_layouts[autocast",
        "test_casts_cached_by_one_autocast",
        "test_weight_pass_within_another_backward",
    ),
    "its kernels have other names, its weights a stream of their own": tuple(
        f"test_w_runs_one_operation_and_no_engine[{case}"
        for case in (
            *("2D x 3D", "transposed", "1D", "without a b", "strided", "groups", "depthwise"),
            *("channels last", "3D]", "viewed weight"),
        )
    ),
    "torch warns of two devices": ("test_contexts_that_can_be_entered_once[fork_rng",),
}


def pytest_configure(config):
    # A GPU's compiler and engine say so of what is slower than it might be.
    config.addinivalue_line("filterwarnings", "ignore:TensorFloat32 tensor cores:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:RNN module weights are not part:UserWarning")
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # of a weight on several streams
    if rounding.ON_GPU:
        torch.testing.assert_close = rounding.on_a_gpu(torch.testing.assert_close)


def pytest_collection_modifyitems(items):
    left_out = NOT_OF_A_DEVICE | (NOT_OF_THE_LATE_DEVICE if late else {})
    for item in items:
        for reason, names in left_out.items():
            if any(name in item.nodeid for name in names):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _on_the_device(monkeypatch):
    if DEVICE == "cpu":
        yield
        return
    plain = zbpipe.stage_backward_weight

    @functools.wraps(plain)
    def on_a_stream_of_its_own(*args, **kwargs):
        with torch.Stream(torch.device(torch.get_default_device().type, torch.accelerator.current_device_index())):
            return plain(*args, **kwargs)

    monkeypatch.setattr(zbpipe, "stage_backward_weight", on_a_stream_of_its_own)
    if late:
        late.begin("others_first")
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)
    if late:
        found = late.races()
        late.finish()
        assert not found, found
    else:
        torch.accelerator.synchronize()  # an error of a kernel is this test's
