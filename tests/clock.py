"""A clock that tests wind."""


class Clock:
    """Tells `now_s`, which only a test moves on."""

    def __init__(self, now_s=100.0):
        self.now_s = now_s

    def __call__(self):
        return self.now_s
