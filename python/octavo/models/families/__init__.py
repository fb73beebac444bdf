"""The families: from an architecture's name to its `Family`.

A module of this package that has a `FAMILY` is a family: adding one is adding a file.
"""

from __future__ import annotations

import importlib
import pkgutil

from octavo.errors import ModelError
from octavo.models.families.base import Family
from octavo.models.fields import Config, shown

FAMILIES: tuple[Family, ...] = tuple(
    module.FAMILY
    for info in pkgutil.iter_modules(__path__)
    if hasattr(module := importlib.import_module(f"{__name__}.{info.name}"), "FAMILY")
)
_BY_ARCHITECTURE = {name: family for family in FAMILIES for name in family.architectures}
_BY_GGUF = {name: family for family in FAMILIES if family.gguf is not None for name in family.gguf.architectures}


def family_of_config(config: Config) -> Family:
    """The family of a `config.json`; `ValueError` names an architecture that is not supported."""
    architectures = config.get("architectures") or []
    for name in architectures if isinstance(architectures, list) else []:
        if isinstance(name, str) and name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name]
    raise ModelError(
        f"architectures={shown(architectures)} is not supported; supported: {', '.join(sorted(_BY_ARCHITECTURE))}"
    )


def family_of_gguf(metadata: Config) -> Family:
    """The family of a GGUF file; `ValueError` names an architecture that is not supported."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _BY_GGUF:
        raise ModelError(
            f"general.architecture={shown(name)} is not supported; supported: {', '.join(sorted(_BY_GGUF))}"
        )
    return _BY_GGUF[name]
