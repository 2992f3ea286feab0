"""`optimum-cli export edgekit`: the command `edgekit export` where users of optimum look for it.

Its options are those of `edgekit export`, read from there, and so is everything that it does: exit statuses too.
optimum imports this module at each start of its command line, so that nothing heavy may be imported here.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

import click
from optimum.commands.base import BaseOptimumCLICommand, CommandInfo

from edgekit.cli import main
from edgekit.cli.export import export

_MODEL = "model"


class EdgeKitExportCommand(BaseOptimumCLICommand):  # type: ignore[misc] # optimum ships no type information
    """The command, as optimum's parser takes it."""

    COMMAND = CommandInfo(name="edgekit", help="Export a language model to an EdgeKit bundle.")

    args: Namespace

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Declares what `edgekit export` declares, but for MODEL, which optimum's commands have as an option."""
        for parameter in export.params:
            if parameter.name == _MODEL:
                parser.add_argument(
                    "-m", "--model", required=True, help="Directory with safetensors, .gguf file or Hugging Face id."
                )
            elif isinstance(parameter, click.Option):
                _add_option(parser, parameter)
            else:
                parser.add_argument(parameter.name, metavar="OUTPUT", help="Directory that the bundle becomes.")

    def run(self) -> None:
        """Runs `edgekit export`.

        Raises:
            SystemExit: Always, with its exit status.
        """
        main(["export", *_arguments(self.args)])


def _add_option(parser: ArgumentParser, option: click.Option) -> None:
    """Declares an option; its value is checked where it is used, and its default applied."""
    text = (option.help or "").replace("%", "%%")
    if option.is_flag:
        parser.add_argument(*option.opts, dest=option.name, action="store_true", help=text)
        return
    choices = option.type.choices if isinstance(option.type, click.Choice) else ()
    metavar = "{" + ",".join(map(str, choices)) + "}" if choices else option.metavar
    if option.show_default:
        text = f"{text} [default: {option.default}]"
    action = "append" if option.multiple else "store"
    parser.add_argument(*option.opts, dest=option.name, action=action, metavar=metavar, help=text)


def _arguments(values: Namespace) -> Iterator[str]:
    """Yields the command line of `edgekit export` for what optimum's parser found."""
    positional = []
    for parameter in export.params:
        value = getattr(values, parameter.name or "")
        if isinstance(parameter, click.Argument):
            positional.append(value)
        elif parameter.multiple:
            for each in value or ():
                yield f"{parameter.opts[-1]}={each}"
        elif value is True:
            yield parameter.opts[-1]
        elif value not in (None, False):
            yield f"{parameter.opts[-1]}={value}"
    yield from ("--", *positional)
