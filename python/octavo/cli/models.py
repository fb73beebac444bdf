"""`octavo models`: what can be run by name, and what a model needs."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from octavo.models.catalog import BUILT_IN, built_in_path, resolve_model

models_app = typer.Typer(help="Built-in models, and what a model needs.", no_args_is_help=False, rich_markup_mode=None)


@models_app.callback(invoke_without_command=True)
def _default(context: typer.Context) -> None:
    """List the built-in models, if no further command is given."""
    if context.invoked_subcommand is None:
        list_models(as_json=False)


@models_app.command("list")
def list_models(as_json: bool = typer.Option(False, "--json", help="One JSON list.")) -> None:
    """List the built-in models and whether their weights are on this machine.

    Any hub id (org/name), folder or .gguf file works as well, wherever a model is asked for.
    """
    rows = [
        {
            "name": model.name,
            "description": model.description,
            "download_megabytes": model.megabytes,
            "on_disk": built_in_path(model).is_file(),
        }
        for model in BUILT_IN.values()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(box=None)
    for column in ("name", "download", "on disk", "what"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            str(row["name"]),
            f"{row['download_megabytes']} MB",
            "yes" if row["on_disk"] else "no",
            str(row["description"]),
        )
    Console().print(table)


@models_app.command("fetch")
def fetch(model: str = typer.Argument(..., help="Built-in name or hub id.")) -> None:
    """Download a model's weights now instead of at first use."""
    print(resolve_model(model).path)
