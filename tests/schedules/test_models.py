"""Models that others wrote, and odd stages, trained under zero-bubble schedules, on zbpipe and on torch's own module."""

import functools
import importlib.util

import pytest
import torch
from schedules.model_ranks import MODELS, NEEDS, RUNS, STEPS, lane_of, reference
from support.oracle import needs_zbpipe
from support.processes import assert_close, lanes_of, together
from torch.nn.attention.flex_attention import flex_attention

WORLD = 2
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    needs_zbpipe,  # runs both modules itself
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft reads it
]

# No input of a stage requires a gradient, and its weights do: as in test_finetuning.py.
WRONG_ON_TORCH = {
    "PEFT's LoRA on the last two layers",
    "PEFT's LoRA on the last layer",
    "the first and the third stage without parameters",
}
NEWER = torch.__version__ >= (2, 16)
# Up to torch 2.12 a stage asks for a gradient of every input, so that it takes no integers from another. Where it gets none 2.11
# is right and 2.12 raises.
OLDER = torch.__version__ < (2, 13)
if OLDER:
    WRONG_ON_TORCH -= {"the first and the third stage without parameters"}
FAILS_ON_TORCH = {"transformer"} if OLDER else set()  # "element 1 of tensors does not require grad", in the decoder
REFUSED = {"the first and the third stage without parameters"} if OLDER and torch.__version__ >= (2, 12) else set()
INTEGERS = {"integers between stages", "the input's integers handed on"}


def parameters(runs):
    """The runs, or models; those are skipped whose package is not there."""
    found = []
    for run in runs:
        values = (run,) if isinstance(run, str) else run
        needed = NEEDS.get(values[0])
        is_missing = needed is not None and importlib.util.find_spec(needed) is None
        marks = [
            pytest.mark.skipif(is_missing, reason=f"needs {needed}"),
            pytest.mark.skipif(
                OLDER and len(values) > 1 and values[0] in INTEGERS, reason="torch's stages up to 2.12 send no integers"
            ),
            pytest.mark.skipif(values[0] in REFUSED, reason="torch 2.12 sends no gradient None"),
        ]
        if len(values) > 1 and lane_of(*values) == "long":
            marks.append(pytest.mark.long)
        found.append(pytest.param(*values, marks=marks))
    return found


folders = lanes_of("schedules/model_ranks.py", WORLD, timeout=400)
expected = functools.cache(reference)


def result(folders, name, schedule, module):
    return together(folders(lane_of(name, schedule)), f"{name} {schedule} {module}", WORLD)


@pytest.mark.parametrize(("name", "schedule"), parameters(RUNS))
def test_a_model_trains_as_it_does_unpipelined(name, schedule, folders):
    assert_close(result(folders, name, schedule, "zbpipe"), expected(name))


@pytest.mark.parametrize(
    ("name", "schedule"), parameters(run for run in RUNS if run[0] not in WRONG_ON_TORCH | FAILS_ON_TORCH)
)
def test_a_model_trains_as_on_torchs_own_module(name, schedule, folders):
    assert_close(result(folders, name, schedule, "zbpipe"), result(folders, name, schedule, "torch"))


@pytest.mark.skipif(NEWER, reason="known of torch 2.11 to 2.15")
@pytest.mark.parametrize(("name", "schedule"), parameters(run for run in RUNS if run[0] in WRONG_ON_TORCH))
def test_torchs_own_module_trains_it_wrong_silently(name, schedule, folders):
    got, wanted = result(folders, name, schedule, "torch"), expected(name)
    grads = [what for what in wanted if what[:2] == (0, "grad")]
    assert any(what not in got or not torch.allclose(got[what], wanted[what]) for what in grads)


@pytest.mark.skipif(NEWER, reason="known of torch 2.11 to 2.15")
def test_torch_refuses_the_backward_of_flex_attention_on_the_cpu():
    """Hence no stage with one is among the models."""
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    for attention in (flex_attention, torch.compile(flex_attention, backend="eager")):
        with pytest.raises(NotImplementedError, match="FlexAttention does not support backward on CPU"):
            attention(q, q, q)


@pytest.mark.parametrize("name", parameters(MODELS))
def test_training_moves_the_losses(name):
    """Else equal losses would say nothing."""
    first, last = (
        sum(value for what, value in expected(name).items() if what[:2] == (step, "loss")) for step in (0, STEPS - 1)
    )
    assert abs(first - last) > 1e-3 * first
