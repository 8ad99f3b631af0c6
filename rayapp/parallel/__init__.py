"""Strategies: how a model and its states are spread over ranks, each behind the engine protocol."""
