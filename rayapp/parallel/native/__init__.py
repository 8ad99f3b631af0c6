"""Strategies in plain torch."""
