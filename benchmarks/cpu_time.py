"""The option that measures the CPU time of one thread, as on a machine that others use."""

from __future__ import annotations

import argparse


def add_cpu_time(parser: argparse.ArgumentParser) -> None:
    """Add the option `--cpu-time`, for `require_one_thread` to check."""
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time of one thread")


def require_one_thread(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with an error where CPU time is measured of more than one thread."""
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time needs --threads 1")
