"""What is checked, and what is derived, before Ray is asked for workers."""

from rayapp.preflight.derive import derive

__all__ = ["derive"]
