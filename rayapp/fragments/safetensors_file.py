"""Safetensors files: whole ones through the library, and in pieces, which the library cannot write.

The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rayapp.errors import Problem, StorageError

PIECE_BYTES = 8 * 2**20
HEADER_ALIGNMENT_BYTES = 8
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file.

    Raises:
        StorageError: the disk refused, or is full.
    """
    try:
        save_file(tensors, path, metadata=metadata)
    except (OSError, SafetensorError) as error:
        raise StorageError(Problem(f"file {path}", f"cannot be written: {error}", "free space, or use another storage.path")) from error


def safetensors_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, a few megabytes at a time.

    A tensor on a GPU comes to the host when its turn comes, so that no second copy of all of them is held.
    """
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # keeps every tensor aligned to its type
    yield memoryview(_header(ordered, metadata))
    for tensor in ordered.values():
        if tensor.numel():
            content = memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            for start in range(0, len(content), PIECE_BYTES):
                yield content[start : start + PIECE_BYTES]


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text
