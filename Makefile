# make demo | test | test-torch TORCH=2.14.1 | check | format | bench | clean

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CODE := $(wildcard src tests benchmarks examples)

# Ranks are processes; a thread pool in each would have them fight for the cores.
export OMP_NUM_THREADS := 1

.PHONY: demo test test-torch browser check format bench clean

# Four workers as two hosts. Slow links need root on Linux; elsewhere it says so and goes on without.
demo: $(READY)
	$(BIN)/loosestep compare \
	  torch-ddp torch-hierarchical:world=8 \
	  loosestep=post_local_sgd:period=8,warmup=0,gradient_wire=exact,wire=int4,overlap=4 \
	  --link 100mbit --or-loopback --steps 60 --eval-every 15 --target 2.5 --report report.html

test: $(READY) browser
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The suite on another version of torch, in an environment of its own; what came of it is kept.
TORCH_VENV ?= .venv-torch-$(TORCH)
test-torch: browser
	@test -n "$(TORCH)" || { echo "say which version: make test-torch TORCH=2.14.1"; exit 2; }
	test -d $(TORCH_VENV) || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/pip install --quiet torch==$(TORCH)
	$(TORCH_VENV)/bin/pip install --quiet torch==$(TORCH) -e '.[dev]'
	$(TORCH_VENV)/bin/python -m pytest $(PYTEST_ARGS) \
	  --result-file tests/results/$(shell date +%F)-torch-$(TORCH).json

# For the tests of the report; without it they are skipped and say so.
browser:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null || \
	  echo "chromium could not be installed"

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
	rm -rf .venv .venv-torch-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch first and pinned to one of the versions that the suite runs on; where a CPU build of it is to be had, this
# takes that one, while a range may choose a newer build with gigabytes of CUDA.
$(READY): pyproject.toml
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $@
