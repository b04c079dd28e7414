"""Names of parameters, for the ranges that profilers show."""

import torch


def name_parameters(module: torch.nn.Module, prefix: str = "") -> None:
    """Gives each parameter of ``module`` its name in it, behind ``prefix``, for profilers: a parameter group's range is
    then called "zbpipe::group layers.0.weight, layers.0.bias", otherwise it shows the parameters' shapes.

    The name is an attribute of the parameter; one with several names keeps the first. A copy (``copy.deepcopy``) has to
    be named again.

    Args:
        module: whose parameters get names.
        prefix: what comes before each name, "stage0." say.

    Source:
        The ranges of ``torch.profiler.record_function`` and of ``torch.autograd.profiler.emit_nvtx``.
    """
    for name, parameter in module.named_parameters():
        parameter._zbpipe_name = prefix + name  # type: ignore[attr-defined]
