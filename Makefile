# make demo | test | check | format | bench | clean

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CODE := $(wildcard src tests benchmarks examples)

# Ranks are processes; a thread pool in each would have them fight for the cores.
export OMP_NUM_THREADS := 1

.PHONY: demo test check format bench clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/mypy $(CODE)

format: $(READY)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch first and pinned to what the suite has run on; where a CPU build of it is to be had, this
# takes that one, while a range may choose a newer build with gigabytes of CUDA.
$(READY): pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@
