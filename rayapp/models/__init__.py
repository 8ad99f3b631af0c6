"""Causal language models: their configuration, their size, their weights and their loss."""
