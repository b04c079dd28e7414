"""Checks of single calls."""

from zbpipe.leaks import check_tensor_leak


def checked(function, **arguments):
    """The report of a call of `function`."""
    with check_tensor_leak(action="record", **arguments) as check:
        function()
    return check.report
