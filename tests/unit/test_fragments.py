"""Fragments of any number of ranks make up the parameters they were cut from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.snapshots import write_files
from torch import Tensor

from rayapp.errors import CheckpointError
from rayapp.fragments import PARTS, STATE_FILE, Fragment, FragmentedState, HostMemory, StateIndex, rank_file, reader_of, take_snapshot

SHAPES = {"a.weight": [5, 3], "b.bias": [7], "c.scale": [1]}


def parameters() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {name: {part: torch.randn(shape, generator=generator) for part in PARTS} for name, shape in SHAPES.items()}


def write(folder: Path, cuts: dict[str, list[int]], world_size: int) -> dict[str, dict[str, Tensor]]:
    """Give rank r the elements from ``cuts[name][r]`` to ``cuts[name][r + 1]``; some ranks get nothing."""
    whole = parameters()
    for rank in range(world_size):
        fragments = []
        for name, borders in cuts.items():
            low, high = borders[rank], borders[rank + 1]
            if low < high:
                fragments.append(Fragment(name, low, {part: whole[name][part].flatten()[low:high] for part in PARTS}))
        index = StateIndex(world_size=world_size, step=9, shapes=SHAPES)
        memory = HostMemory() if rank % 2 else None
        write_files(take_snapshot(rank, index, fragments, {"table": torch.arange(4)}, memory), folder)
    return whole


def numel(name: str) -> int:
    return int(torch.Size(SHAPES[name]).numel())


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_cut_comes_back_whole_and_in_runs(data: st.DataObject) -> None:
    import tempfile

    world_size = data.draw(st.integers(1, 4))
    cuts = {
        name: [0, *sorted(data.draw(st.lists(st.integers(0, numel(name)), min_size=world_size - 1, max_size=world_size - 1))), numel(name)]
        for name in SHAPES
    }
    with tempfile.TemporaryDirectory() as path:
        whole = write(Path(path), cuts, world_size)
        state = FragmentedState(Path(path))
        assert (state.step, state.names(), state.loss_scale) == (9, list(SHAPES), None)
        assert state.buffers().keys() == {"table"}
        for parameter in state:
            for part in PARTS:
                assert torch.equal(getattr(parameter, part), whole[parameter.name][part])
        name = data.draw(st.sampled_from(sorted(SHAPES)))
        start = data.draw(st.integers(0, numel(name)))
        length = data.draw(st.integers(0, numel(name) - start))
        assert torch.equal(state.run(name, "exp_avg", start, length), whole[name]["exp_avg"].flatten()[start : start + length])
        assert torch.equal(reader_of(state)(name, "weight", start, length), whole[name]["weight"].flatten()[start : start + length])


def test_values_are_kept_in_fp32(tmp_path: Path) -> None:
    exact = torch.tensor([1.0, 1.0 + 2**-7], dtype=torch.bfloat16)
    index = StateIndex(world_size=1, step=0, shapes={"x": [2]})
    write_files(take_snapshot(0, index, [Fragment("x", 0, dict.fromkeys(PARTS, exact))], {}, None), tmp_path)
    found = FragmentedState(tmp_path).whole("x", "weight")
    assert found.dtype == torch.float32
    assert found.tolist() == [1.0, 1.0078125]


def test_elements_that_no_rank_holds_are_noticed(tmp_path: Path) -> None:
    write(tmp_path, {"a.weight": [0, 4, 10], "b.bias": [0, 7, 7], "c.scale": [0, 0, 1]}, 2)
    state = FragmentedState(tmp_path)
    assert state.run("a.weight", "weight", 2, 8).numel() == 8
    with pytest.raises(CheckpointError, match=r"parameter a\.weight of checkpoint .* has 10 of the 15 elements asked for"):
        state.whole("a.weight", "weight")


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {name: [0, numel(name)] for name in SHAPES}, 1)
    state = FragmentedState(tmp_path)
    state.check_shapes(SHAPES)
    with pytest.raises(CheckpointError, match=r"parameter a\.weight has shape \[5, 3\] in checkpoint .* and \[3, 5\] in the model"):
        state.check_shapes({**SHAPES, "a.weight": [3, 5]})
    with pytest.raises(CheckpointError, match=r"parameter d has shape None in checkpoint .* and \[1\] in the model"):
        state.check_shapes({**SHAPES, "d": [1]})
    with pytest.raises(CheckpointError, match=r"parameter c\.scale has shape \[1\] in checkpoint .* and None in the model"):
        state.check_shapes({name: shape for name, shape in SHAPES.items() if name != "c.scale"})


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no usable state\.json"):
        FragmentedState(tmp_path)
    write(tmp_path, {name: [0, numel(name), numel(name)] for name in SHAPES}, 2)
    (tmp_path / rank_file(1, 2)).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002\.safetensors cannot be read"):
        FragmentedState(tmp_path)
    (tmp_path / rank_file(1, 2)).unlink()
    with pytest.raises(CheckpointError, match=r"rank-00001-of-00002\.safetensors cannot be read"):
        FragmentedState(tmp_path)
    (tmp_path / STATE_FILE).write_text('{"world_size": "many"}')
    with pytest.raises(CheckpointError, match=r"has no usable state\.json"):
        FragmentedState(tmp_path)
