# `make test` and `make demo` need only Python >= 3.11 and make. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: install test lint demo benchmark clean
.DELETE_ON_ERROR:

install: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("decomp needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[experiments,notebooks,dev]'
	@touch $@

test: lint
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

demo: $(READY)
	$(BIN)/python -m experiments.compare --flagfile=experiments/flags/demo.flags

benchmark: $(READY)
	$(BIN)/python -m experiments.benchmark

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache runs
