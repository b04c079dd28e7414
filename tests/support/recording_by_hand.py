"""A recording that is fed by hand, for tests of what is made of one."""

import torch

from zbpipe.memory import Recording
from zbpipe.memory._cuda import Replay  # what plays a history


class ByHand(Replay):
    """What feeds a recording, and the recording: changes of so many bytes at an address, at times in ns that rise."""

    def __init__(self):
        super().__init__()
        self.now, self.history = 0, []
        self.recording = Recording(self, torch.device("cpu"), 1000)

    def start(self, objects):
        self.mark()

    def stop(self):
        self.play(self.history)
        return False

    def mark(self):
        self.places.append((len(self.history), self.now))
        return len(self.places) - 1

    def change(self, time_ns, address, size):
        self.now = time_ns
        self.history.append((time_ns, address, size))
