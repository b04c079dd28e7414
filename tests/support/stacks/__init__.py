"""For tests/stacks: the model, its training beside a reference, and what a step does."""
