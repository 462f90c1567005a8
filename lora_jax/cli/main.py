"""`lora-jax COMMAND ...`: parses the words, runs the command, turns errors into text.

Exit codes: 0 done; 2 the user can mend it (the message says how); 130 interrupted.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from lora_jax.cli import (
    bench,
    classify,
    convert,
    demo,
    embed,
    extract,
    generate,
    inspect,
    merge,
)
from lora_jax.cli.console import print_error
from lora_jax.errors import LoRAError

COMMANDS = {
    "demo": demo,
    "generate": generate,
    "embed": embed,
    "classify": classify,
    "inspect": inspect,
    "convert": convert,
    "merge": merge,
    "extract": extract,
    "bench": bench,
}
"""Command -> module with SUMMARY, DETAILS, `add_arguments(parser)` and `run(args)`."""

DONE, MENDABLE, INTERRUPTED = 0, 2, 130

DEBUG_VARIABLE = "LORA_JAX_DEBUG"
"""Set to anything, unexpected errors show where they came from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
      argv: the words after `lora-jax`; None takes them from the process.
    """
    args = build_parser().parse_args(argv)
    try:
        return COMMANDS[args.command].run(args)
    except LoRAError as error:
        print_error(str(error))
    except BrokenPipeError:
        # Whoever read our output has stopped (`| head`): not worth a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:
        print_error(str(error))
    except KeyboardInterrupt:
        print_error("interrupted.")
        return INTERRUPTED
    except Exception as error:
        _print_unexpected(error)
    return MENDABLE


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="lora-jax",
        description="One base model, many LoRA adapters, one jitted JAX step.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="lora-jax COMMAND --help says what a command takes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.SUMMARY,
            description=f"{module.SUMMARY}\n\n{module.DETAILS}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
    return parser


def _version() -> str:
    try:
        return f"lora-jax {version('lora-jax')}"
    except PackageNotFoundError:
        return "lora-jax (not installed)"


def _print_unexpected(error: Exception) -> None:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    print_error(
        f"unexpected {type(error).__name__}: {error}\n"
        f"Set {DEBUG_VARIABLE}=1 to see where it happened."
    )
