"""A recording that is fed by hand, for tests of what is made of one."""

import torch

from zbpipe import _C  # a recorder without an allocator
from zbpipe.memory import Recording


class ByHand:
    """The source of a recording, and the recording. Times in ns are given to each call; they only ever rise."""

    def __init__(self, max_events=1000):
        self.log = _C.Recorder(max_events)
        self.now = 0
        self.recording = Recording(self, torch.device("cpu"), max_events)

    def start(self):
        self.log.replay_begin(0)

    def stop(self):
        return False

    def mark(self):
        return self.log.replay_mark(self.now)

    def counters(self):
        return self.log.counters()

    def alloc(self, time, address, size):
        self.now = time
        self.log.replay_alloc(time, address, size)

    def free(self, time, address, size=0):
        self.now = time
        self.log.replay_free(time, address, size)
