"""Every command takes the engine's arguments: made once, from `EngineConfig`'s fields."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import typer

from octavo.config import DEFAULT_MODEL, EngineConfig

_PANEL = "Engine"


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` an option for each field of `EngineConfig`; it receives them as one `config` argument.

    Fields that the command declares itself (such as a positional `model`) are left to it.
    """
    own = inspect.signature(command).parameters
    types = typing.get_type_hints(EngineConfig)
    options = []
    for f in fields(EngineConfig):
        name = "model_option" if f.name == "model" else f.name
        kind = types[f.name]
        if typing.get_origin(kind) is typing.Literal:
            kind = str  # the config names the choices in its own error
        if f.name == "override_generation_config":
            kind = str | None  # the config reads the JSON text
        flag = "--" + f.name.replace("_", "-")
        flags = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
        default = None if f.name == "model" else f.default
        annotation = (kind | None) if f.name == "model" else kind
        option = typer.Option(default, *flags, help=f.metadata["help"], rich_help_panel=_PANEL)
        options.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation))

    @functools.wraps(command)
    def wrapper(**kwargs: Any) -> None:
        values = {f.name: kwargs.pop("model_option" if f.name == "model" else f.name) for f in fields(EngineConfig)}
        positional = kwargs.pop("model", None)
        values["model"] = values["model"] or positional or DEFAULT_MODEL
        command(config=EngineConfig.from_kwargs(**values), **kwargs)

    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for n, p in own.items() if n != "config"]
    wrapper.__signature__ = inspect.Signature([*kept, *options])  # type: ignore[attr-defined]
    hints = {n: h for n, h in typing.get_type_hints(command).items() if n not in ("config", "return")}
    wrapper.__annotations__ = {**hints, **{p.name: p.annotation for p in options}, "return": None}
    return wrapper
