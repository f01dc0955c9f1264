# SPDX-License-Identifier: Apache-2.0
"""Exit codes and output of commands: errors on one line, JSON, progress.

Exit codes: 0; 1 if some items failed, with one line each; 2 for a user error or an output that
cannot be written; 130 if interrupted.
"""

import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from quadtree_attention.cli.options import OPTIONS, Option
from quadtree_attention.errors import OptionError, QuadtreeAttentionError

FAILED, MISTAKE, INTERRUPTED = 1, 2, 130


def command(
    app: typer.Typer,
    name: str,
    run: Callable[[typer.Context], None],
    text: str | None,
    options: str = "",
    own: Mapping[str, Option] | None = None,
    **settings: Any,
) -> None:
    """Add a command that reports errors on one line.

    Args:
        app: The application.
        name: Name of the command.
        run: Function that reads the values of all options from `context.params`.
        text: Help text.
        options: Names of shared options in `OPTIONS`, listed after its own.
        own: Own options of the command, by name.
        **settings: Settings of typer.
    """
    declared = {"context": (typer.Context, ...), **(own or {})}
    declared |= {option: OPTIONS[option] for option in options.split()}

    def checked(context: typer.Context, **values: Any) -> None:
        with errors_on_one_line(debug=values.get("debug", False)):
            run(context)

    keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(key, keyword, annotation=kind, default=empty if value is ... else value)
        for key, (kind, value) in declared.items()
    ]
    checked.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    checked.__annotations__ = {key: kind for key, (kind, _) in declared.items()}
    app.command(name, help=text, **settings)(checked)


@contextmanager
def errors_on_one_line(*, debug: bool = False) -> Iterator[None]:
    """Turn expected errors into one line and an exit code."""
    try:
        yield
        sys.stdout.flush()
    except QuadtreeAttentionError as error:
        if debug:
            traceback.print_exc()
        tell(str(error))
        raise typer.Exit(MISTAKE) from None
    except BrokenPipeError:  # the reader closed the pipe, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(0) from None
    except OSError as error:
        if debug:
            traceback.print_exc()
        where = f"{error.filename}: " if error.filename else ""
        tell(f"{where}{error.strerror or error}; make room, or write elsewhere")
        try:
            sys.stdout.flush()
        except OSError:  # no second error when a full standard output is closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise typer.Exit(MISTAKE) from None
    except KeyboardInterrupt as error:
        tell(str(error) or "interrupted")
        raise typer.Exit(INTERRUPTED) from None


def imported() -> None:
    """Restore KeyboardInterrupt; called after a command has imported its dependencies."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exclusive(context: typer.Context, option: str, *others: str) -> None:
    """Raise `OptionError` if `option` and one of the others were given on the command line."""
    if is_given(context, option) and (given := [o for o in others if is_given(context, o)]):
        raise OptionError(
            f"{_flag(context, option)} excludes {', '.join(_flag(context, o) for o in given)}; "
            "pass only one of them"
        )


def is_given(context: typer.Context, option: str) -> bool:
    """True if an option was given on the command line."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _flag(context: typer.Context, option: str) -> str:
    """Name of an option on the command line."""
    parameter = next(p for p in context.command.params if p.name == option)
    return parameter.opts[0] if parameter.opts[0].startswith("-") else str(parameter.metavar)


def tell(message: str) -> None:
    """Write one line to standard error."""
    from tqdm import tqdm

    tqdm.write(f"quadtree: {' '.join(message.split())}", file=sys.stderr)


def say(text: str) -> None:
    """Write text to standard output, with ? for unsupported characters."""
    from tqdm import tqdm

    tqdm.write(printable(text), file=sys.stdout)
    sys.stdout.flush()


def printable(text: str) -> str:
    """Replace bars by # and other characters unsupported by standard output by ?."""
    from quadtree_attention.tasks.contract import BLOCKS

    encoding = sys.stdout.encoding or "ascii"
    if BLOCKS.encode(encoding, "replace").decode(encoding) != BLOCKS:
        text = text.translate({ord(c): "#" if i >= 4 else " " for i, c in enumerate(BLOCKS)})
    return text.encode(encoding, "replace").decode(encoding)


def say_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def written(paths: Sequence[object]) -> str:
    return ", ".join(str(path) for path in paths if path is not None)
