"""A clock that tests control."""


class Clock:
    """Clock that returns `now_s`, which only the test changes."""

    def __init__(self, now_s=100.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s
