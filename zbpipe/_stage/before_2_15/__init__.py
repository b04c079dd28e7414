"""What stages and schedules of torch 2.15 do themselves; this package goes when torch 2.14 does.

Up to torch 2.14 a schedule keeps receive buffers, sends and outputs for longer than they are needed. This package frees
them, around the methods that drive a stage (methods.py).
"""
