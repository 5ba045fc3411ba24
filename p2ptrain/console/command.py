"""Run a command line: a mistake of the user's is one sentence, and exit code 2."""

import sys
from typing import NoReturn

import typer
from typer.exceptions import TyperException

from p2ptrain import exit_codes
from p2ptrain.errors import P2PTrainError


def run_command(program: typer.Typer, name: str | None = None) -> NoReturn:
    """Run `program`, which `name` is on the command line, to its exit code.

    An option that is unknown, or has a value of another type, is a mistake as any other: its
    sentence says where the help is.

    Raises:
        SystemExit: always.
    """
    try:
        code = program(prog_name=name, standalone_mode=False)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        program_name = context.command_path if context else name or "this command"
        said = error.format_message().rstrip(".")
        print(f"error: {said[:1].lower()}{said[1:]}; see {program_name} --help", file=sys.stderr)
        sys.exit(exit_codes.MISTAKE)
    except P2PTrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_codes.MISTAKE)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)
    sys.exit(code if isinstance(code, int) else exit_codes.OK)
