"""Entry point of `octavo`: commands, and errors of one line."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import typer

from octavo.cli.batch import batch
from octavo.cli.bench import bench_app
from octavo.cli.chat import chat
from octavo.cli.generate import generate
from octavo.cli.models import models_app
from octavo.cli.serve import serve
from octavo.cli.verify import verify
from octavo.config import FOREIGN_ARGUMENTS
from octavo.errors import OctavoError

_HELP = """An LLM inference engine: fast on a laptop's CPU, on one GPU, on many.

First steps (the built-in model needs 93 MB; it is downloaded once):

\b
  octavo chat                                      talk to the built-in model
  octavo generate -p "The capital of France is"    complete a text
  octavo serve                                     answer OpenAI's protocol at port 8000
  octavo batch questions.jsonl answers.jsonl       answer a file of requests
  octavo models                                    which models there are

Any model: octavo chat org/name, a folder, or a .gguf file. octavo COMMAND --help has examples of each command.
"""

# The base of every error of the command line's syntax, whichever click typer uses.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    help=_HELP,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("chat")(chat)
app.command("generate")(generate)
app.command("serve")(serve)
app.command("verify")(verify)
app.command("batch")(batch)
app.add_typer(bench_app, name="bench")
app.add_typer(models_app, name="models")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    if version:
        from octavo import __version__  # noqa: PLC0415

        typer.echo(f"octavo {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Runs the command line; errors that the user can mend are one line on stderr, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A model may write any character, whatever the terminal's encoding.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(standalone_mode=False, prog_name="octavo")
        if sys.stdout is not None:
            sys.stdout.flush()
    except _UsageError as error:
        code = _usage(error)
    except OctavoError as error:
        code = _fail(str(error), 2)
    except BrokenPipeError:  # the reader of the output has left: `octavo … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:  # output that cannot be written: a full disk, say
        code = _fail(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    typer.secho(f"octavo: {message}", fg=None if os.environ.get("NO_COLOR") else "red", err=True)
    return code


def _usage(error: Any) -> int:
    """What is wrong with the command line, and where to look; a flag of another engine is answered with ours."""
    command = error.ctx.command_path if error.ctx is not None else "octavo"
    message = error.format_message()
    if "\n" in message:  # the help of a group of commands that was given alone
        typer.echo(message)
        return 2
    ours = FOREIGN_ARGUMENTS.get(str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_"))
    if ours is not None:
        message = f"no such option: {error.option_name}; octavo calls it --{ours.replace('_', '-')}"
    message = " ".join(message.split()).rstrip(".")
    return _fail(f"{message[:1].lower()}{message[1:]}; see {command} --help", 2)
