"""Every error a caller can meet. What the caller did wrong is a `ValueError` that names the parameter."""

from __future__ import annotations

_SHOWN = 80


class OctavoError(Exception):
    """The base of all."""


class ParameterError(OctavoError, ValueError):
    """A parameter has a wrong type or value.

    Attributes:
        param: its name, as the caller wrote it.
        value: what was given.
        allowed: what would have been right, as the end of "must be ...".
    """

    def __init__(self, param: str, value: object, allowed: str) -> None:
        self.param = param
        self.value = value
        self.allowed = allowed
        shown = _repr(value)
        if len(shown) > _SHOWN:
            shown = shown[: _SHOWN - 3] + "..."
        # One line, whatever a template or a value's repr contains.
        super().__init__(" ".join(f"{param} must be {allowed}, got {shown}".splitlines()))

    def __reduce__(self) -> tuple[type[ParameterError], tuple[str, object, str]]:
        return type(self), (self.param, self.value, self.allowed)


def _repr(value: object) -> str:
    """`repr`, whatever it raises: a wrong value must not hide which parameter it was."""
    try:
        return repr(value)
    except Exception:
        return f"a value of type {type(value).__name__}"


def check_text(param: str, value: object) -> str:
    """The value, if it is a string that UTF-8 can hold.

    Raises:
        ParameterError: it is no string, or has a surrogate.
    """
    if not isinstance(value, str):
        raise ParameterError(param, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ParameterError(param, value[error.start], "text without surrogates (UTF-8 cannot hold them)") from None
    return value


class ContextLengthError(ParameterError):
    """A prompt leaves no room for a token.

    Attributes:
        num_tokens: tokens of the prompt.
        max_model_len: tokens a sequence can have.
    """

    code = "context_length_exceeded"

    def __init__(self, num_tokens: int, max_model_len: int) -> None:
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len
        allowed = f"at most {max_model_len - 1} tokens (the context is {max_model_len}, one is for the output)"
        super().__init__("prompt", f"{num_tokens} tokens", allowed)

    def __reduce__(self) -> tuple[type[ContextLengthError], tuple[int, int]]:  # type: ignore[override]
        return type(self), (self.num_tokens, self.max_model_len)


class ModelError(OctavoError, ValueError):
    """A model cannot be found, read or run; the message names the file, field or tensor."""


class InvalidRequestError(OctavoError, ValueError):
    """The control plane refuses a request; the message names the parameter."""


class EngineError(OctavoError, RuntimeError):
    """The engine failed or was shut down; no request of it goes on."""


class RequestError(OctavoError, RuntimeError):
    """One request failed inside the engine; the others go on."""
