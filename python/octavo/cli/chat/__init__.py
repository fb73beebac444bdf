"""`octavo chat`: a conversation in the terminal."""

from octavo.cli.chat.command import chat

__all__ = ["chat"]
