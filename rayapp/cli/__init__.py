"""The command line. Each verb is one file; Ray and torch are loaded only by the verbs that use them, when they do."""

from rayapp.cli.app import main

__all__ = ["main"]
