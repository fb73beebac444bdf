"""Options that commands share: the engine's, made of `EngineConfig`'s fields, and those of sampling."""

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

# Name of the parameter of `SamplingParams`, type, help, and the flag where it is not the name's.
_SAMPLING: tuple[tuple[str, Any, str, str | None], ...] = (
    ("max_tokens", int, "Output tokens at most (16 by default; in a chat, the rest of the context).", None),
    ("temperature", float, "0 is greedy.", None),
    ("top_p", float, "Keep the likeliest tokens whose probabilities reach this.", None),
    ("top_k", int, "Keep this many of the likeliest tokens.", None),
    ("min_p", float, "Drop tokens less likely than this times the likeliest.", None),
    ("presence_penalty", float, "Subtracted from the logit of each token already written.", None),
    ("frequency_penalty", float, "The same, for each time it was written.", None),
    ("repetition_penalty", float, "Makes tokens of prompt and output less likely; 1 is neutral.", None),
    ("seed", int, "Seed of this command's draws.", "--sampling-seed"),
    ("stop", list[str], "End before this text; may be given many times.", None),
    ("min_tokens", int, "Output tokens before which the model may not end.", None),
    ("ignore_eos", bool, "Go on to --max-tokens whatever the model says.", "--ignore-eos/--no-ignore-eos"),
)


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


def sampling_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives `command` an option for each usual sampling parameter; it receives those given as one mapping `sampling`."""
    options = []
    for name, kind, help_text, flags in _SAMPLING:
        option = typer.Option(None, flags or "--" + name.replace("_", "-"), help=help_text, rich_help_panel="Sampling")
        annotation = kind | None
        options.append(
            inspect.Parameter(f"sampling_{name}", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)
        )

    @functools.wraps(command)
    def wrapper(**kwargs: Any) -> None:
        given = {name: kwargs.pop(f"sampling_{name}") for name, *_ in _SAMPLING}
        # An option that may be repeated is an empty list when it is absent.
        sampling = {name: value for name, value in given.items() if value is not None and value != []}
        command(sampling=sampling, **kwargs)

    own = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, p in inspect.signature(command).parameters.items()
        if name != "sampling"
    ]
    wrapper.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    hints = {name: hint for name, hint in typing.get_type_hints(command).items() if name not in ("sampling", "return")}
    wrapper.__annotations__ = {**hints, **{p.name: p.annotation for p in options}, "return": None}
    return wrapper
