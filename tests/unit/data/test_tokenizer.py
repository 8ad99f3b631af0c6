"""The trained tokenizer writes any text; loading turns every failure into a DataError."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rayapp.data.group import encoder
from rayapp.data.tokenizer import backend_json, load_tokenizer, save_tokenizer, tokenizer_sha256, train_tokenizer, vocab_size_of
from rayapp.errors import DataError
from rayapp.storage import open_location

TEXTS = ["def f(x):\n    return x + 1\n", "the quick brown fox\n", "for i in range(10):\n    print(i)\n"] * 5


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(iter(TEXTS), 290)


@given(
    st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["<|endoftext|>", "a<|endoftext|>b", "\r\n\t  ", "👩‍👩‍👧", "\x00"])
)
def test_any_text_comes_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Both ways to encode: as transformers does it, and as the shards are made."""
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ids = encoder(backend_json(tokenizer)).encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id not in ids


def test_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    assert vocab_size_of(tokenizer) == len(tokenizer) == 290
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer("def f(x):")["input_ids"]) < len("def f(x):")


def test_a_small_corpus_gives_a_small_vocabulary() -> None:
    assert vocab_size_of(train_tokenizer(iter(["ab"]), 1000)) == 258
    assert vocab_size_of(train_tokenizer(iter([]), 1000)) == 257


def test_training_is_deterministic() -> None:
    assert tokenizer_sha256(train_tokenizer(iter(TEXTS), 290)) == tokenizer_sha256(train_tokenizer(iter(TEXTS), 290))
    assert tokenizer_sha256(train_tokenizer(iter(TEXTS), 290)) != tokenizer_sha256(train_tokenizer(iter(TEXTS), 289))


def test_the_texts_are_streamed() -> None:
    taken = []

    def texts() -> Iterator[str]:
        for i in range(100):
            taken.append(i)
            yield f"text {i}"

    train_tokenizer(texts(), 300)
    assert taken == list(range(100))


def test_saved_and_loaded(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, open_location(str(tmp_path / "t")))
    loaded = load_tokenizer(str(tmp_path / "t"))
    assert tokenizer_sha256(loaded) == tokenizer_sha256(tokenizer)
    assert loaded("def g(): pass")["input_ids"] == tokenizer("def g(): pass")["input_ids"]
    assert AutoTokenizer.from_pretrained(tmp_path / "t").eos_token_id == tokenizer.eos_token_id


def test_a_truncation_in_the_file_does_not_cut_documents(tokenizer: PreTrainedTokenizerFast) -> None:
    content = json.loads(backend_json(tokenizer))
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    assert len(encoder(json.dumps(content)).encode("x y z " * 100).ids) > 100


def test_vocabulary_with_a_gap_counts_the_largest_id(tokenizer: PreTrainedTokenizerFast) -> None:
    content = json.loads(backend_json(tokenizer))
    content["model"]["vocab"]["zzz"] = 999
    assert vocab_size_of(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))) == 1000


def test_no_end_of_sequence_token(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("content", [None, "{", '{"model": {}}'])
def test_a_folder_without_a_tokenizer(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DataError, match="cannot be loaded") as error:
            load_tokenizer(str(path))
        assert error.value.problems[0].remedy


def test_a_hub_name_that_is_not_cached_offline(tmp_path: Path) -> None:
    """In a process of its own: the hub's client reads its environment when it is imported."""
    code = "from rayapp.data.tokenizer import load_tokenizer; load_tokenizer('some-one/no-such-model')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "DataError: tokenizer 'some-one/no-such-model' cannot be loaded" in done.stderr
