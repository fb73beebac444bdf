"""What an output must be, as users ask for it. The rules of these fields are in Rust, the server's too."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo._core import FieldError, structured_outputs, structured_outputs_of_body
from octavo.errors import ParameterError
from octavo.inputs import to_json

BODY_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
"""The fields of a request body that `of_body` reads."""


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """What the output must be; exactly one field is given.

    Raises:
        ParameterError: none or several are given, or one is of a wrong form. Whether a grammar compiles is seen when a request
            has it.
    """

    json: str | dict[str, Any] | None = None
    """A JSON schema, as such or as its text."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """Texts, one of which the output is."""
    grammar: str | None = None
    """A grammar in llguidance's variant of Lark."""
    json_object: bool | None = None
    """True: any JSON object."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        text = to_json("structured_outputs", given)
        try:
            param, options = structured_outputs(text)
        except FieldError as error:
            raise _wrong(error, given) from error
        self._param = param
        self._options = options

    @property
    def param(self) -> str:
        """The name of the field that is given."""
        return self._param

    @property
    def options(self) -> str:
        """The fields in their normal form, as JSON."""
        return self._options

    @classmethod
    def parse(cls, value: object) -> StructuredOutputsParams:
        """The value itself, or of a mapping with its fields."""
        if isinstance(value, cls):
            # Its fields may have been assigned since it was made.
            value = {name: field for name, field in asdict(value).items() if field is not None}
        if not isinstance(value, Mapping):
            raise ParameterError("structured_outputs", value, "a StructuredOutputsParams")
        try:
            return cls(**value)
        except TypeError:
            names = ", ".join(cls.__dataclass_fields__)
            raise ParameterError("structured_outputs", dict(value), f"a mapping with one of {names}") from None

    @classmethod
    def of_body(cls, body: Mapping[str, Any]) -> StructuredOutputsParams | None:
        """What the fields of a request body ask for."""
        given = {name: body[name] for name in BODY_FIELDS if body.get(name) is not None}
        if not given:
            return None
        try:
            found = structured_outputs_of_body(to_json("body", given))
        except FieldError as error:
            raise _wrong(error, given) from error
        return None if found is None else cls(**jsonlib.loads(found[1]))


def _wrong(error: FieldError, given: Mapping[str, Any]) -> ParameterError:
    param, allowed = error.args
    value: Any = given
    for name in param.removeprefix("structured_outputs.").split("."):
        value = value.get(name) if isinstance(value, Mapping) and name in value else value
    return ParameterError(param, value, allowed)
