"""Servers of models that say a known text."""

from __future__ import annotations

from collections.abc import Callable

from tests.server.running import Server

Speak = Callable[[str, str, tuple[str, ...]], Server]
"""Starts a server of a model that says a text, with a chat template and special tokens."""
