"""Run a command line: a mistake of the user's is one sentence, and exit code 2."""

import sys
from importlib import import_module
from typing import NoReturn

import typer

from p2ptrain import __version__, exit_codes
from p2ptrain.errors import P2PTrainError
from p2ptrain.standard_streams import finish_streams, prepare_streams, print_error


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"p2ptrain {__version__}")
        raise typer.Exit


VERSION = typer.Option(
    "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
)
HELP = {"help_option_names": ["-h", "--help"]}


def _usage_errors() -> type[Exception]:
    """What typer raises for a wrong word; the older ones raise what click does."""
    for module, name in (("typer.exceptions", "TyperException"), ("click", "ClickException")):
        try:
            kind: type[Exception] = getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
        return kind
    return typer.BadParameter


def run_command(program: typer.Typer, name: str | None = None) -> NoReturn:
    """Run `program`, which `name` is on the command line, to its exit code.

    An option that is unknown, or has a value of another type, is a mistake as any other: its
    sentence says where the help is.

    Raises:
        SystemExit: always.
    """
    prepare_streams()
    try:
        code = program(prog_name=name, standalone_mode=False)
    except _usage_errors() as error:
        context = getattr(error, "ctx", None)
        program_name = context.command_path if context else name or "this command"
        said = str(getattr(error, "format_message", error.__str__)()).rstrip(".")
        print_error(f"error: {said[:1].lower()}{said[1:]}; see {program_name} --help")
        sys.exit(exit_codes.MISTAKE)
    except P2PTrainError as error:
        print_error(f"error: {error}")
        sys.exit(exit_codes.MISTAKE)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    finally:
        finish_streams()
    sys.exit(code if isinstance(code, int) else exit_codes.OK)
