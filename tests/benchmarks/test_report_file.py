"""Options of a benchmark, with the command of its run."""

import argparse

import pytest

from benchmarks.report_file import parse_options


def test_the_command_repeats_the_run():
    parser = argparse.ArgumentParser(prog="benchmarks.load")
    parser.add_argument("--prompts")
    options = parse_options(parser, ["--prompts", "two words"])
    assert options.command == "python -m benchmarks.load --prompts 'two words'"


def test_a_parser_that_is_not_named_as_a_module_is_refused():
    with pytest.raises(AssertionError, match="pytest"):
        parse_options(argparse.ArgumentParser(prog="pytest"), [])
