"""`octavo serve`: OpenAI's protocol over HTTP. This process is the front; it never loads torch."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from octavo.cli.options import engine_options
from octavo.config import EngineConfig
from octavo.errors import EngineError, ParameterError

_UNKNOWN_FIELDS = ("reject", "warn")
_PANEL = "Server"


@engine_options
def serve(
    config: EngineConfig,
    model: str | None = typer.Argument(None, help="Model: built-in name, hub id, folder or .gguf file."),
    host: str = typer.Option("127.0.0.1", help="Address to listen at; 0.0.0.0 for all.", rich_help_panel=_PANEL),
    port: int = typer.Option(8000, help="Port; 0 takes a free one.", rich_help_panel=_PANEL),
    served_model_name: list[str] | None = typer.Option(
        None, help="Name by which requests ask for the model; may be given many times.", rich_help_panel=_PANEL
    ),
    api_key: list[str] | None = typer.Option(
        None,
        help="Key without which only /health, /ready and / answer; may be given many times. OCTAVO_API_KEY is one more.",
        rich_help_panel=_PANEL,
    ),
    allowed_origin: list[str] | None = typer.Option(
        None, help="Origin whose web pages may read replies (CORS); * is all.", rich_help_panel=_PANEL
    ),
    ssl_certfile: Path | None = typer.Option(
        None, help="Certificate chain (PEM); with --ssl-keyfile the server speaks TLS.", rich_help_panel=_PANEL
    ),
    ssl_keyfile: Path | None = typer.Option(None, help="Key of the certificate (PEM).", rich_help_panel=_PANEL),
    unknown_fields: str = typer.Option(
        "reject", help="What a field that nobody knows does: `reject` the request, or `warn`.", rich_help_panel=_PANEL
    ),
    max_body_bytes: int = typer.Option(32 << 20, help="Bytes of a request at most.", rich_help_panel=_PANEL),
    max_queued_requests: int = typer.Option(
        1024, help="Sequences that may wait besides those that run; more get 429.", rich_help_panel=_PANEL
    ),
    shutdown_timeout: float = typer.Option(
        30.0, help="Seconds that running requests have to finish after SIGTERM.", rich_help_panel=_PANEL
    ),
    engine_timeout: float = typer.Option(
        30.0,
        help="Seconds without progress, while requests run, after which the engine is restarted.",
        rich_help_panel=_PANEL,
    ),
    otlp_endpoint: str | None = typer.Option(
        None,
        help="OpenTelemetry collector (OTLP over HTTP, as http://localhost:4318) that gets a span of each generation.",
        rich_help_panel=_PANEL,
    ),
) -> None:
    """Serve a model to OpenAI's clients.

    The server answers /health within a second and /ready once the model is loaded. If the process that runs the model dies, it
    is started again and all requests go on where they stopped.

    \b
    Examples:
      octavo serve
      octavo serve org/name --host 0.0.0.0 --api-key secret
      curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once", "max_tokens": 20}'

    SIGTERM or Ctrl-C lets running requests finish; a second one ends them.
    """
    if unknown_fields not in _UNKNOWN_FIELDS:
        raise ParameterError("unknown_fields", unknown_fields, "one of " + ", ".join(_UNKNOWN_FIELDS))
    if (ssl_certfile is None) != (ssl_keyfile is None):
        name = "ssl_keyfile" if ssl_keyfile is None else "ssl_certfile"
        raise ParameterError(name, None, "given: the certificate and its key go together")
    _require("port", port, 0, 65535)
    _require("max_body_bytes", max_body_bytes, 1, 1 << 32)
    _require("max_queued_requests", max_queued_requests, 0, 1 << 20)
    _require("shutdown_timeout", shutdown_timeout, 0, 86400)
    _require("engine_timeout", engine_timeout, 1, 86400)
    keys = list(api_key or [])
    if os.environ.get("OCTAVO_API_KEY"):
        keys.append(os.environ["OCTAVO_API_KEY"])
    arguments: dict[str, Any] = {
        "host": host,
        "port": port,
        "model": config.model,
        "served_model_name": served_model_name or [config.model],
        "api_key": keys,
        "allowed_origin": allowed_origin or [],
        "tls": None if ssl_certfile is None else [str(ssl_certfile), str(ssl_keyfile)],
        "unknown_fields": unknown_fields,
        "max_body_bytes": max_body_bytes,
        "max_queued_requests": max_queued_requests,
        "shutdown_timeout": shutdown_timeout,
        "engine_timeout": engine_timeout,
        "otlp_endpoint": otlp_endpoint,
        "tool_call_parser": config.tool_call_parser,
        "reasoning_parser": config.reasoning_parser,
        "engine_command": [sys.executable, "-m", "octavo.engine_process"],
        "engine_config": asdict(config),
    }
    raise typer.Exit(run_front(arguments))


def run_front(arguments: dict[str, Any]) -> int:
    """Runs the front with the fields of `octavo_server::ServerConfig`; returns the exit code.

    Raises:
        ParameterError: an argument is wrong.
        EngineError: the engine cannot be started, or not kept alive.
    """
    from octavo import _core  # noqa: PLC0415

    try:
        return _core.serve(json.dumps(arguments))
    except ValueError as error:
        raise ParameterError("serve", str(error), "valid arguments") from error
    except RuntimeError as error:
        raise EngineError(str(error)) from error


def _require(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ParameterError(name, value, f"from {low} to {high}")
