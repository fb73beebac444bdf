"""The families: from an architecture's name to its `Family`."""

from __future__ import annotations

from octavo.errors import ModelError
from octavo.models.families import llama
from octavo.models.families.base import Config, Family

BY_ARCHITECTURE: dict[str, Family] = {"LlamaForCausalLM": llama.FAMILY}
"""By the name in `architectures` of a `config.json`."""
BY_GGUF: dict[str, Family] = {"llama": llama.FAMILY}
"""By `general.architecture` of a GGUF file."""


def family_of_config(config: Config) -> Family:
    """The family of a `config.json`; `ValueError` names an architecture that is not supported."""
    architectures = config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and name in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[name]
    raise ModelError(
        f"architectures={architectures!r} is not supported; supported: {', '.join(sorted(BY_ARCHITECTURE))}"
    )


def family_of_gguf(metadata: Config) -> Family:
    """The family of a GGUF file; `ValueError` names an architecture that is not supported."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in BY_GGUF:
        raise ModelError(f"general.architecture={name!r} is not supported; supported: {', '.join(sorted(BY_GGUF))}")
    return BY_GGUF[name]
