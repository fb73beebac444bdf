"""Entry point of `octavo`: commands, and errors of one line."""

from __future__ import annotations

import io
import sys

import typer

from octavo.cli.bench import bench_app
from octavo.cli.generate import generate
from octavo.cli.models import models_app
from octavo.cli.verify import verify
from octavo.errors import OctavoError

_HELP = """An LLM inference engine: fast on a laptop's CPU, on one GPU, on many.

Start with:  octavo generate -p "The capital of France is"
"""


app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("generate")(generate)
app.command("verify")(verify)
app.add_typer(bench_app, name="bench")
app.add_typer(models_app, name="models")


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from octavo import __version__  # noqa: PLC0415

        typer.echo(f"octavo {__version__}")
        raise typer.Exit


def main() -> None:
    """Runs the command line; errors that the user can mend are one line on stderr, without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may write any character, whatever the terminal's encoding.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except OctavoError as error:
        typer.secho(f"octavo: {error}", fg="red", err=True)
        sys.exit(2)
    except OSError as error:  # output that cannot be written: a full disk, say
        typer.secho(f"octavo: {error}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
