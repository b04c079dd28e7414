"""Whether patch() is in force, and what was said to it: its own word, which the stages' methods go by."""

in_force = False
release_outputs = False  # takes effect with the next forward of each stage
