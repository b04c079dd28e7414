"""Names of parameters, for the ranges that profilers show."""

import torch


def name_parameters(module: torch.nn.Module, prefix: str = "") -> None:
    """Gives each parameter of ``module`` its name in it, behind ``prefix``, for profilers: a parameter group's range is
    then called "zbpipe::group layers.0.weight, layers.0.bias", otherwise it shows the parameters' shapes.

    The name is an attribute of the parameter; one with several names keeps the first.
    """
    for name, parameter in module.named_parameters():
        parameter._zbpipe_name = prefix + name  # type: ignore[attr-defined]
