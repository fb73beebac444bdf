"""GLM-4, both generations."""

from __future__ import annotations

from typing import ClassVar

from family_check import CheckFamily, small
from transformers import Glm4Config, GlmConfig


class TestGlm4(CheckFamily):
    variants: ClassVar = {
        "glm4": small(Glm4Config, head_dim=16),
        "glm": small(GlmConfig, head_dim=16),
    }
