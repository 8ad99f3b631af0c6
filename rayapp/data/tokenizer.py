"""The tokenizer: trained on the corpus, or loaded from a folder or the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rayapp.errors import DataError, Problem
from rayapp.storage import Location

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which can write any text.

    Args:
        texts: read once, and not held.
        vocab_size: entries at most, the special token and the 256 bytes included; fewer if the texts have no more pairs.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerFast:
    """Load a tokenizer from a local folder or by its hub name.

    Raises:
        DataError: it cannot be loaded, has no fast form, or no end-of-sequence token.
    """
    subject = f"tokenizer {path!r}"
    if path.startswith(("/", ".", "~")) and not Path(path).expanduser().exists():
        raise DataError(Problem(subject, "cannot be loaded: there is no such folder", "give an existing folder or a hub name"))
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, revision=revision)
    except (OSError, ValueError, KeyError, ImportError) as error:  # what transformers raises for a name, a file, a class, a package
        raise DataError(
            Problem(
                subject,
                f"cannot be loaded: {_first_line(error)}",
                "give a folder that holds tokenizer.json, or a hub name that is cached or can be reached",
            )
        ) from error
    if not tokenizer.is_fast:
        raise DataError(Problem(subject, "has no tokenizer.json", "convert it to a fast tokenizer of transformers"))
    if tokenizer.eos_token_id is None:
        raise DataError(
            Problem(subject, "has no end-of-sequence token, which ends each document", "set eos_token in its tokenizer_config.json")
        )
    return tokenizer


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def backend_json(tokenizer: PreTrainedTokenizerFast) -> str:
    """The whole tokenizer as `tokenizers` writes it, small enough to hand to every process."""
    return str(tokenizer.backend_tokenizer.to_str())


def tokenizer_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Tells tokenizers apart: of all that turns text into ids, and the id that ends documents."""
    return hashlib.sha256(f"{tokenizer.eos_token_id}\n{backend_json(tokenizer)}".encode()).hexdigest()


def vocab_size_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """Rows that an embedding needs: one more than the largest id, which a vocabulary with gaps makes more than its entries."""
    return 1 + int(max(tokenizer.get_vocab().values()))


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Location) -> None:
    """Write a Hugging Face folder.

    Raises:
        StorageError: the storage refused.
    """
    folder.make_dirs()
    with TemporaryDirectory() as local:
        tokenizer.save_pretrained(local)
        for path in sorted(Path(local).rglob("*")):
            if path.is_file():
                (folder / path.relative_to(local).as_posix()).write_bytes(path.read_bytes())
