"""`octavo verify`: is octavo right about this model on this machine?"""

from __future__ import annotations

import json
from pathlib import Path

import typer

from octavo.cli.options import engine_options
from octavo.config import EngineConfig
from octavo.errors import ParameterError


@engine_options
def verify(
    config: EngineConfig,
    model: str | None = typer.Argument(None, help="Model: built-in name, hub id, folder or .gguf file."),
    tokens: int = typer.Option(1000, help="Tokens of text to score."),
    text: Path | None = typer.Option(None, help="A UTF-8 file to score instead of the built-in text."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object instead of a table."),
) -> None:
    """Compare a model's token ids, log-probabilities and perplexity with transformers' on this machine.

    Needs transformers: pip install 'octavo[verify]'. The fp32 path must agree to 0.001 nat, the path as it runs (with your
    --backend, --dtype and other options) closely, both in perplexity within 1 %.

    Exit status: 0 octavo agrees, 1 it differs, 2 it could not be found out.

    Examples:

      octavo verify smollm2-135m

      octavo verify ./folder --tokens 4000 --text book.txt --json
    """
    if tokens < 2:
        raise ParameterError("tokens", tokens, "at least 2")
    content = None if text is None else _read(text)
    from octavo.quality.report import EXIT_STATUS, print_report  # noqa: PLC0415
    from octavo.quality.verify import verify as run  # noqa: PLC0415  loads torch

    report = run(config, tokens, content)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        print_report(report)
    raise typer.Exit(EXIT_STATUS[report.verdict])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("text", str(path), f"a readable UTF-8 file ({error})") from error
