"""`octavo models`: what can be run by name, and what a model is and needs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octavo.models.catalog import BUILT_IN, built_in_path, resolve_model
from octavo.units import format_bytes, format_count

_PIPED_WIDTH = 200
_HELP = """Find, fetch and inspect models.

Wherever a command asks for a model it takes

  smollm2-135m              a built-in name; see: octavo models list

  org/name                  a model of the Hugging Face hub

  org/name@revision         a branch, tag or commit of it

  org/name:file.gguf        one file of it

  path/to/folder            config.json and safetensors files

  path/to/file.gguf         a GGUF file

Of a hub repository only the files of one model are fetched. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are honoured.
"""

models_app = typer.Typer(help=_HELP, no_args_is_help=False, rich_markup_mode=None)


@models_app.callback(invoke_without_command=True, help=_HELP)
def _default(context: typer.Context) -> None:
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
    """Download a model's weights now instead of at first use, and print where they are."""
    print(resolve_model(model).path)


@models_app.command("show")
def show(
    model: str = typer.Argument(..., help="Built-in name, hub id, folder or .gguf file."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object."),
) -> None:
    """Show what a model is, what it needs, and what of it fits this machine.

    Reads headers only, so it is quick whatever the size; a model of the hub is fetched first.
    Fails with the reason if the model cannot be run.

    Examples:

      octavo models show smollm2-135m

      octavo models show ./folder --json
    """
    found = _describe(model)
    if as_json:
        print(json.dumps(found))
        return
    # Piped, lines are whole; a terminal folds them.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    for title, rows in _sections(found):
        console.print(title, style="bold", markup=False)
        table = Table(box=None, show_header=False, pad_edge=True, padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        console.print(table)


def _describe(model: str) -> dict[str, Any]:
    """Everything that is shown, as JSON values."""
    source = resolve_model(model)
    from octavo.defaults import load_sampling_defaults  # noqa: PLC0415
    from octavo.machine import this_machine  # noqa: PLC0415  loads torch
    from octavo.models.describe import describe_model  # noqa: PLC0415
    from octavo.models.loader import open_model  # noqa: PLC0415
    from octavo.text import describe_text  # noqa: PLC0415

    described = describe_model(open_model(source), this_machine())
    defaults = load_sampling_defaults("auto", None, source.path)
    return {**asdict(described), "text": asdict(describe_text(source.path)), "sampling_defaults": dict(defaults.values)}


def _sections(found: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    return [
        (f"{found['name']} ({found['path']})", _architecture(found)),
        ("Weights", _weights(found)),
        ("KV cache", _cache(found)),
        ("Text", _text(found)),
        *((f"On this machine: {fit['machine']}", _fit(fit, found["context_length"])) for fit in found["fits"]),
    ]


def _architecture(found: dict[str, Any]) -> list[tuple[str, str]]:
    active = found["active_parameters"]
    used = f", {format_count(active)} active per token" if active != found["parameters"] else ""
    rows = [
        ("family", found["family"]),
        ("parameters", format_count(found["parameters"]) + used),
        ("layers", f"{found['num_layers']} of width {found['hidden_size']:,}"),
    ]
    if found["num_experts"]:
        experts = f"{found['num_experts_per_token']} of {found['num_experts']} for each token"
        rows.append(("experts", f"{experts}, each of width {found['intermediate_size']:,}"))
    else:
        rows.append(("feed-forward", f"width {found['intermediate_size']:,}"))
    shapes = dict.fromkeys((a["num_heads"], a["num_kv_heads"], a["head_dim"]) for a in found["attention"])
    rows += [("attention", f"{h} heads, {kv} key/value heads, of {d} elements") for h, kv, d in shapes]
    rows += [
        ("window", found["window_pattern"]),
        ("context", f"{found['context_length']:,} tokens"),
        ("head", "shares the embedding's weights" if found["tied_embeddings"] else "has weights of its own"),
    ]
    return rows


def _weights(found: dict[str, Any]) -> list[tuple[str, str]]:
    bits = 8 * found["stored_bytes"] / max(1, found["parameters"])
    return [
        ("on disk", f"{format_bytes(found['stored_bytes'])}, {bits:.2f} bits per parameter"),
        *(
            (share["storage"], f"{_tensors(share['tensors'])}, {format_bytes(share['bytes'])}")
            for share in found["storage"]
        ),
    ]


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count:,} tensors"


def _cache(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for cost in found["cache"]:
        each, beyond = cost["bytes_per_token"], cost["bytes_per_token_beyond_windows"]
        later = f" ({format_bytes(beyond)} beyond the windows)" if beyond != each else ""
        most = f"{format_bytes(cost['bytes_at_max_length'])} for a request of the whole context"
        rows.append((cost["dtype"], f"{format_bytes(each)} per token{later}, {most}"))
    return rows


def _text(found: dict[str, Any]) -> list[tuple[str, str]]:
    text, defaults = found["text"], found["sampling_defaults"]
    return [
        ("tokenizer", text["tokenizer"]),
        ("vocabulary", f"{text['tokens']:,} tokens, {found['vocab_size']:,} rows of the embedding"),
        (
            "chat template",
            "yes" if text["has_chat_template"] else "no: probably a base model, for generate rather than chat",
        ),
        ("sampling defaults", ", ".join(f"{name}={value}" for name, value in defaults.items()) or "built in"),
    ]


def _fit(fit: dict[str, Any], context: int) -> list[tuple[str, str]]:
    rows = [
        ("memory", f"{format_bytes(fit['free_bytes'])} free of {format_bytes(fit['total_bytes'])}"),
        ("weights", f"{format_bytes(fit['weight_bytes'])}: {'fit' if fit['weights_fit'] else 'do not fit'}"),
    ]
    if fit["weights_fit"]:
        whole = " (the whole context)" if fit["longest_request"] == context else f" of {context:,}"
        rows += [
            ("KV cache", f"{format_bytes(fit['cache_bytes'])} ({fit['cache_dtype']}), {fit['cache_tokens']:,} tokens"),
            ("longest request", f"{fit['longest_request']:,} tokens{whole}"),
        ]
    return rows
