PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# How many tests run side by side. Files come in their order, those of single units last: they are short, so that all
# who work through them end at about the same time.
JOBS ?= 2
SIDE_BY_SIDE = -n $(JOBS) --dist loadfile --no-loadscope-reorder
# One thread per process: several processes share the cores, and results stay comparable.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: demo test test-all test-gpu lint bench bench-peers clean
.DELETE_ON_ERROR:

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $@

# Servers and launchers that tests start.
$(VENV)/packages: tests/packages.txt tests/install_packages.sh $(VENV)/ready
	tests/install_packages.sh
	touch $@

demo: $(VENV)/ready
	$(BIN)/shoal train examples/digits.py --workers 2 --name demo --overwrite

lint: $(VENV)/ready
	$(BIN)/ruff format --check src benchmarks tests examples
	$(BIN)/ruff check src benchmarks tests examples
	$(BIN)/mypy

# What measures nothing runs side by side; the rest has the machine for itself.
ALONE = $(shell grep -rl "mark.alone" tests --include=*.py)
test: lint $(VENV)/packages
	$(BIN)/pytest -m "not long and not alone" $(SIDE_BY_SIDE)
	$(BIN)/pytest -m "not long and alone" $(ALONE)

test-all: lint $(VENV)/packages
	$(BIN)/pytest -m "not alone" $(SIDE_BY_SIDE)
	$(BIN)/pytest -m "alone" $(ALONE)

# What needs a GPU; all else is skipped there.
test-gpu: $(VENV)/ready
	$(BIN)/pytest tests/integration/test_gpu.py tests/integration/test_gpu_arena.py

# TensorFlow in an environment of its own; where it cannot be had, the benchmark runs without it and says so.
bench-peers: $(VENV)/ready
	-$(BIN)/python -m benchmarks.environment

bench: bench-peers
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .venv-tensorflow .venv-flower build dist .pytest_cache .mypy_cache .ruff_cache
