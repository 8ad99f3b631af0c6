"""Checkpoints and runs in storage, and the export to a Hugging Face folder."""
