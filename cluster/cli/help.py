"""Help under headings, for commands with so many options that a list would not be read."""

from __future__ import annotations

from typing import Any

import click

_WIDTH = 100


class SectionedOption(click.Option):
    """An option that says under which heading it stands."""

    def __init__(self, *arguments: Any, section: str, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.section = section


class SectionedCommand(click.Command):
    """A command with so many options that its help shows them under headings."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.context_settings.setdefault("max_content_width", _WIDTH)

    def sections(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Options and what they mean by heading, in the order of the first of each."""
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                found.setdefault(getattr(parameter, "section", "Options"), []).append(record)
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes each heading with its options."""
        for heading, records in self.sections(ctx).items():
            with formatter.section(heading):
                formatter.write_dl(records)
