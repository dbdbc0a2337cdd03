# `make test` and `make demo` need only Python >= 3.11 and make. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv$(if $(filter-out python3,$(PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The compiler of TPUs, for tests on what it makes of the programs. It lies apart, so that nothing
# else is slower or talks about TPUs; where it does not exist, those tests say so.
TPU := $(VENV)/tpu
LIBTPU := import importlib.metadata as m; print(next(r.split(';')[0] for r in m.requires('jax') if r.startswith('libtpu')))

# The lowest versions of everything that pyproject.toml allows, in an environment of their own.
LOWEST := .venv-lowest
TESTS ?=

.PHONY: install test test-lowest test-gpu-compiler lint demo benchmark clean
.DELETE_ON_ERROR:

install: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("decomp needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[experiments,notebooks,dev]'
	@touch $@

$(TPU): $(READY)
	-$(BIN)/python -m pip install --quiet --no-deps --target $@ "$$($(BIN)/python -c "$(LIBTPU)")"
	@mkdir -p $@ && touch $@

test: lint $(TPU)
	$(BIN)/python -m pytest -n auto --dist worksteal

# All tests, or TESTS='tests/test_spec.py ...'.
test-lowest: pyproject.toml
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet uv
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable '.[experiments,notebooks,dev]'
	$(LOWEST)/bin/python -m pytest -n auto --dist worksteal $(TESTS)

# The compiler of NVIDIA's GPUs takes about 6 GB.
test-gpu-compiler: $(READY)
	$(BIN)/python -m pip install --quiet --editable '.[gpu]'
	DECOMP_COMPILER=gpu JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 $(BIN)/python -m pytest tests/test_compilers.py

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
