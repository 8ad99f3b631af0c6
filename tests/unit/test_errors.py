"""Errors cross processes whole: a worker's refusal is told by the driver."""

from __future__ import annotations

import pickle

import pytest

from rayapp import errors
from rayapp.errors import InputError, Problem, RayappError, RunError

PROBLEMS = (Problem("a=1", "is not 2", "use 2", "x.yaml:3"), Problem("b=''", "is empty"))


def classes_below(root: type[RayappError]) -> list[type[RayappError]]:
    return [root, *(found for child in root.__subclasses__() for found in classes_below(child))]


@pytest.mark.parametrize("kind", classes_below(InputError))
def test_an_input_error_comes_back_from_pickle_with_its_problems(kind: type[InputError]) -> None:
    error = pickle.loads(pickle.dumps(kind(*PROBLEMS)))
    assert type(error) is kind
    assert error.problems == PROBLEMS
    assert str(error) == "x.yaml:3: a=1 is not 2; use 2\nb='' is empty"
    assert error.exit_status == 2


@pytest.mark.parametrize("kind", classes_below(RunError))
def test_a_run_error_comes_back_from_pickle(kind: type[RunError]) -> None:
    error = pickle.loads(pickle.dumps(kind("it broke")))
    status = {errors.InterruptedRunError: 130, errors.TerminatedRunError: 143}.get(kind, 1)
    assert (type(error), str(error), error.exit_status) == (kind, "it broke", status)


def test_an_input_error_has_a_problem() -> None:
    with pytest.raises(ValueError, match="at least one Problem"):
        InputError()


def test_the_docstring_draws_the_whole_tree() -> None:
    drawn = errors.__doc__ or ""
    assert [kind.__name__ for kind in classes_below(RayappError) if f" {kind.__name__} " not in f" {drawn} ".replace("\n", " ")] == []
