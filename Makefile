# Two commands do everything on a fresh machine with Python and pip: `make run` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUN_FILE := jobs/quickstart.yaml
BENCHMARK ?= jobs/quickstart.yaml train.num_steps=20 train.validation_rows=8
CHECKPOINT_BENCHMARK ?= --weights-millions 8,80
PYTEST := $(BIN)/python -m pytest

.PHONY: install run test lint types unit integration e2e test-slow benchmark-launch benchmark-checkpoints clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

run: install
	$(BIN)/python -m rayapp prepare $(RUN_FILE)
	$(BIN)/python -m rayapp train $(RUN_FILE)
	$(BIN)/python -m rayapp generate $(RUN_FILE) --prompt 'def '

test: lint types unit integration e2e

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install
	$(BIN)/mypy

unit: install
	$(PYTEST) tests/unit

integration: install
	$(PYTEST) tests/integration -m 'not slow'

e2e: install
	$(PYTEST) tests/e2e -m 'not slow'

test-slow: install
	$(PYTEST) tests -m slow

benchmark-launch: install
	$(BIN)/python tests/benchmarks/launch_overhead.py $(BENCHMARK)

benchmark-checkpoints: install
	$(BIN)/python tests/benchmarks/checkpoint_cost.py $(CHECKPOINT_BENCHMARK)

clean:
	rm -rf $(VENV) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
