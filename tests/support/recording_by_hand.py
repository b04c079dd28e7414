"""A recording that is fed by hand, for tests of what is made of one."""

import torch

from zbpipe.memory import Recording
from zbpipe.memory._cuda import Replay  # what feeds a recording by hand


class ByHand(Replay):
    """What feeds a recording, and the recording. Times in ns are given to each call; they only ever rise."""

    def __init__(self):
        super().__init__()
        self.now = 0
        self.recording = Recording(self, torch.device("cpu"), 1000)

    def start(self, objects):
        self.mark()

    def stop(self):
        return False

    def mark(self):
        return self.add_mark(self.now)

    def alloc(self, time_ns, address, size):
        self.now = time_ns
        self.add(time_ns, address, size)

    def free(self, time_ns, address, size=0):
        self.now = time_ns
        self.add(time_ns, address, -size)
