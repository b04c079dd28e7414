"""A word about parameter groups that are freed before their weight pass, since their gradients are lost."""

import sys
import warnings

from zbpipe._C import ParamGroup
from zbpipe._formatting import described
from zbpipe._stage import fsdp, idle

START = "a parameter group was freed before its weight pass"


def warn(group: ParamGroup) -> None:
    """Called by C as a group goes that no W has begun, if no I or W has failed since it was made."""
    if sys.exc_info()[1] is not None or _is_ignored():
        return
    names = {
        weight: f"{name} of stage {stage.stage_index}"
        for stage in list(idle.stages)
        for name, weight in stage.submod.named_parameters()
    }
    lost = ", ".join(names.get(weight) or described(weight) for weight in fsdp.served_by(group))
    warnings.warn(
        f"{START}, and the gradient of {lost} is lost for its microbatch; give all groups of stage_backward_input to "
        "stage_backward_weight",
        ResourceWarning,
        stacklevel=2,
    )


def _is_ignored() -> bool:
    """As it is by default: then no names are looked for, among all parameters and for each group."""
    for action, message, category, module, _ in warnings.filters:
        if issubclass(ResourceWarning, category) and (message is None or message.match(START)):
            return action == "ignore" and module is None
    return False
