"""What a GPU's rounding allows, in one place: its libraries choose kernels by strides and alignment, and some add in any order.

On the CPU, and on the device that runs late, nothing: there results are the same bits.
"""

import functools
import os

import torch

ON_GPU = os.environ.get("ZBPIPE_DEVICE", "cpu").startswith("cuda")
ALLOWED = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def dtypes_in(value):
    if isinstance(value, torch.Tensor):
        return {value.dtype.to_real() if value.is_complex() else value.dtype}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return set().union(*map(dtypes_in, parts))


def on_a_gpu(assert_close):
    """torch's assert_close, with tolerances no narrower than those of the coarsest dtype among the tensors."""

    @functools.wraps(assert_close)
    def close(actual, expected, *, rtol=None, atol=None, **options):
        if least := max((ALLOWED.get(dtype, 0.0) for dtype in dtypes_in([actual, expected])), default=0.0):
            rtol, atol = max(rtol or 0.0, least), max(atol or 0.0, least)
        return assert_close(actual, expected, rtol=rtol, atol=atol, **options)

    return close


def equal(one, other):
    """To the bit, but on a GPU."""
    return torch.allclose(one, other, ALLOWED[one.dtype], ALLOWED[one.dtype]) if ON_GPU else torch.equal(one, other)
