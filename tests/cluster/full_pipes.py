"""Standard error whose reader stops."""

import os
from contextlib import contextmanager


@contextmanager
def stderr_in_pipe():
    """Let standard error be a pipe within the context; yield the end from which it is read."""
    reader, writer = os.pipe()
    previous = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield reader
    finally:
        os.dup2(previous, 2)
        os.close(previous)
        os.close(reader)
