"""Strategies through DeepSpeed. Its spellings and its traps stay in this folder."""
