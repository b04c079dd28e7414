"""What torch 2.15's own stages and schedules do themselves; all of this goes when torch 2.14 does.

Up to torch 2.14 a schedule keeps receive buffers, sends and outputs for longer than anything needs them. Here they are
let go of: methods.py is what is done around the methods that drive a stage.
"""
