"""For tests/stacks: the model, its training beside a reference, and the processes that run the cases."""
