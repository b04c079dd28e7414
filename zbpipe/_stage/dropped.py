"""A word about parameter groups that are freed before their weight pass, since their gradients are lost."""

import sys
import warnings

from zbpipe._C import ParamGroup
from zbpipe._formatting import described
from zbpipe._stage import fsdp, idle


def warn(group: ParamGroup) -> None:
    """Called by C as a group goes that no W has begun, if no I or W has raised since it was made."""
    if sys.exc_info()[1] is not None or _is_ignored():
        return
    modules = [stage.submod for stage in list(idle.stages)]
    names = {weight: name for module in modules for name, weight in module.named_parameters()}
    lost = ", ".join(names.get(weight) or described(weight) for weight in fsdp.served_by(group))
    warnings.warn(
        f"a parameter group was freed before its weight pass, and the gradient of {lost} is lost for its microbatch; "
        "give all groups of stage_backward_input to stage_backward_weight",
        ResourceWarning,
        stacklevel=2,
    )


def _is_ignored() -> bool:
    """As it is by default: then no names are looked for, among all parameters and for each group."""
    first = next((of for of in warnings.filters if issubclass(ResourceWarning, of[2])), None)
    return first is not None and first[:2] == ("ignore", None) and first[3] is None
