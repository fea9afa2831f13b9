"""Help output with options grouped into sections, for commands with many options."""

from __future__ import annotations

from typing import Any

import click

_WIDTH = 100


class SectionedOption(click.Option):
    """An option that belongs to a section of the help."""

    def __init__(self, *arguments: Any, section: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.section = section


class SectionedCommand(click.Command):
    """A command whose help groups the options into sections."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.context_settings.setdefault("max_content_width", _WIDTH)

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Return the help records of the options by section, in the order of the options."""
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                found.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each section with its options."""
        for heading, records in self.sections(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)
