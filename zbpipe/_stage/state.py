"""patch()'s state, by which the wrappers of stages' methods decide."""

in_force = False
release_outputs = False  # takes effect with the next forward of each stage
