"""Train, tune and serve large language models on a Ray cluster from one file."""

__version__ = "0.1.0"
