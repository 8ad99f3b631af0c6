"""From a checkpoint of any strategy to a Hugging Face folder, one block of the model at a time and without a GPU."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayapp.checkpoint.checkpoints import checkpoint_at
from rayapp.checkpoint.runs import RunFolder, read_resolved
from rayapp.config.resolved import ResolvedRun
from rayapp.documents import ExportDocument
from rayapp.errors import CheckpointError, Problem, StorageError
from rayapp.fragments import FragmentedState, save_tensors
from rayapp.models.build import DTYPES, meta_network, transformers_config
from rayapp.models.transformer import SimpleTransformer
from rayapp.storage import Location, open_location

EXPORTED_ENDINGS = (".json", ".safetensors", ".jinja", ".txt", ".model")
BLOCK_NAME = re.compile(r"^(.*?\.\d+)\.")


def export_run(run_dir: Location, out: Location, step: int | None = None, dtype: str | None = None) -> ExportDocument:
    """Write the weights of a run's checkpoint, its configuration and its tokenizer as a Hugging Face folder.

    Args:
        run_dir: the run's folder.
        out: where the folder is made; it appears when it is complete, and replaces an older one.
        step: of the checkpoint; None: the newest intact one.
        dtype: ``fp32``, ``bf16`` or ``fp16``; None: the run file's, else as trained.

    Raises:
        CheckpointError: no such run or checkpoint, or a damaged one.
        StorageError: ``out`` holds something else than an export.
    """
    run = read_resolved(run_dir)
    chosen = dtype or run.file.export.dtype or run.file.train.precision
    if chosen not in DTYPES:
        raise CheckpointError(Problem(f"dtype={chosen!r}", "is not one of fp32, bf16, fp16", "use one of them"))
    _check_target(out, run_dir)
    checkpoint = checkpoint_at(RunFolder(run_dir).checkpoints, step)
    tokenizer = _tokenizer_files(run)
    with _appearing(out) as folder:
        with checkpoint.opened() as files:
            num_parameters = _write_weights(FragmentedState(files), run, folder, DTYPES[chosen])
        _write_configuration(run, folder, DTYPES[chosen])
        for file in tokenizer:
            file.download(folder / file.name)
    return ExportDocument(model_dir=str(out), run_dir=str(run_dir), step=checkpoint.step, num_parameters=num_parameters, dtype=chosen)


def _check_target(out: Location, run_dir: Location) -> None:
    """Refuse to replace what is not an export."""
    if not out.exists():
        return
    holds = {child.name for child in out.children()}
    foreign = sorted(name for name in holds if not name.endswith(EXPORTED_ENDINGS))
    if not out.is_dir() or foreign or (holds and "config.json" not in holds):
        found = f"holds {foreign[0]}" if foreign else "is there and is not an export"
        raise StorageError(Problem(f"export folder {out}", f"{found}, and an export replaces the whole folder", "give a new folder"))
    if run_dir.path == out.path or run_dir.path.startswith(f"{out.path}/"):
        raise StorageError(Problem(f"export folder {out}", f"contains the run {run_dir}", "give a new folder"))


def _tokenizer_files(run: ResolvedRun) -> list[Location]:
    files = list((open_location(run.data.folder, retry_s=run.file.storage.retry_s) / "tokenizer").files())
    if not files:
        raise CheckpointError(
            Problem(f"data {run.data.folder}", "has no tokenizer, which belongs to an export", "make it again: rayapp prepare FILE")
        )
    return files


@contextlib.contextmanager
def _appearing(out: Location) -> Iterator[Path]:
    """A local folder to fill, which becomes ``out`` at the end; nothing is left of it after an error."""
    if out.is_local:
        out.local_path.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".rayapp-export-", dir=out.local_path.parent if out.is_local else None))
    try:
        yield staging
        _publish(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, out: Location) -> None:
    out.delete()
    if out.is_local:
        staging.chmod(0o755)
        staging.rename(out.local_path)
        return
    out.make_dirs()
    files = sorted(staging.iterdir(), key=lambda path: path.name == "config.json")  # what makes it a model comes last
    for path in files:
        (out / path.name).upload(path)


def _write_weights(state: FragmentedState, run: ResolvedRun, folder: Path, dtype: torch.dtype) -> int:
    """Safetensors files of at most ``export.max_shard_bytes`` and their index; gives the number of weights."""
    writer = _ShardWriter(folder, run.file.export.max_shard_bytes)
    network = meta_network(run.transformers_config, attention="eager")
    num_parameters = 0
    for names in _blocks(state.names()):
        block = {name: state.whole(name, "weight").to(dtype) for name in names}
        num_parameters += sum(tensor.numel() for tensor in block.values())
        writer.add(_as_published(network, block))
    writer.add(state.buffers())
    if isinstance(network, SimpleTransformer):
        writer.add(dict([network.config.opt_positions(dtype)]))
    writer.close()
    return num_parameters


def _blocks(names: list[str]) -> Iterator[list[str]]:
    """Names that belong to one layer together; the conversion to the published names needs a whole layer."""

    def block_of(name: str) -> str:
        match = BLOCK_NAME.match(name)
        return match.group(1) if match else name

    for _, group in groupby(names, key=block_of):
        yield list(group)


def _as_published(network: Any, block: dict[str, Tensor]) -> dict[str, Tensor]:
    """A block under the names and shapes of the model's published checkpoints (experts one by one, for instance)."""
    if isinstance(network, SimpleTransformer):
        return block
    from transformers.core_model_loading import revert_weight_conversion

    published: dict[str, Tensor] = revert_weight_conversion(network, block)
    return published


class _ShardWriter:
    """Collects tensors into safetensors files and writes the index that transformers reads."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if self._pending and self._pending_bytes + size > self._max_bytes:
                self._write()
            self._pending[name] = tensor.contiguous()
            self._pending_bytes += size

    def _write(self) -> None:
        save_tensors(self._pending, self._folder / f"shard-{len(self._shards)}", {"format": "pt"})
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> None:
        if self._pending:
            self._write()
        count = len(self._shards)
        if count == 1:
            (self._folder / "shard-0").rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"shard-{index}").rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        document = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(document, indent=1))


def _write_configuration(run: ResolvedRun, folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = transformers_config(run.transformers_config)
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.dtype = dtype
    config.save_pretrained(folder)
    generation = GenerationConfig.from_model_config(config)
    generation.save_pretrained(folder)
