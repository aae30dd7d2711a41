"""The command line: ``llamatap`` or ``python -m llamatap``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from llamatap.commands import COMMANDS
from llamatap.errors import Error

__all__ = ["main"]

# Options whose values may begin with a minus sign; argparse would take such a value for an option.
_SIGNED = ("--layers", "--verifier-layers", "--window", "--text", "--tokens", "--chat", "--prompt", "--stop")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parsed = _parser().parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe. What is still buffered must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as if SIGPIPE had ended the program
    except (Error, OSError) as error:
        print(f"llamatap: {error}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"llamatap: out of memory{f': {error}' if str(error) else ''}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _joined(arguments: Sequence[str]) -> list[str]:
    given = iter(arguments)
    joined = []
    for argument in given:
        value = next(given, None) if argument in _SIGNED else None
        joined.append(argument if value is None else f"{argument}={value}")
    return joined


class _Version(argparse.Action):
    """Prints the version."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from llamatap import __version__

        print(f"llamatap {__version__}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llamatap", description="Hidden states of any layer of any GGUF model."
    )
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
