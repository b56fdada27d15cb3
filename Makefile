# make demo | check | test | test-fast | test-long | test-torch TORCH=2.14.1 | format | bench | dist | clean

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
CODE := $(wildcard src tests benchmarks examples)
NATIVE := $(wildcard src/loosestep/comm/native/*.c src/loosestep/comm/native/*.h)

# Tests side by side, each with ranks of its own: they wait as much as they compute. A worker that dies ends
# the run: another in its place would wait for ever for what was left of its groups.
WORKERS ?= 4
SIDE_BY_SIDE := -n $(WORKERS) --dist loadgroup --max-worker-restart 0

# Hundreds of processes import the package and the tests: Python keeps what it has compiled, also where
# the environment says otherwise.
test test-fast test-long test-torch: export PYTHONDONTWRITEBYTECODE :=

# Ranks are processes; a thread pool in each would have them fight for the cores.
demo bench: export OMP_NUM_THREADS := 1

.PHONY: demo test test-fast test-long test-torch browser check format bench dist clean

# Four workers as two hosts. Slow links need root on Linux; elsewhere it says so and goes on without.
demo: $(READY)
	$(BIN)/loosestep compare \
	  torch-ddp torch-hierarchical:world=8 \
	  loosestep=post_local_sgd:period=8,warmup_steps=0,gradient_reducer=mean,reducer=int4,overlap_steps=4 \
	  --link 100mbit --or-loopback --steps 60 --eval-every 15 --target 2.5 --report report.html

test: $(READY) browser
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# Without namespaces, browser and commands.
test-fast: $(READY)
	$(BIN)/python -m pytest -m 'fast and not long' $(SIDE_BY_SIDE) $(PYTEST_ARGS)

# Endurance, matrices, sanitizers and larger random searches; keeps a dated result.
test-long: $(READY)
	$(BIN)/python -m pytest -m 'long or hypothesis' --hypothesis-profile thorough --timeout 1200 \
	  $(SIDE_BY_SIDE) --result-file tests/results/$$(date +%F)-long.json $(PYTEST_ARGS)

# The suite on another version of torch, in an environment of its own; what came of it is kept.
TORCH_VENV ?= .venv-torch-$(TORCH)
test-torch: browser
	@test -n "$(TORCH)" || { echo "say which version: make test-torch TORCH=2.14.1"; exit 2; }
	test -d $(TORCH_VENV) || $(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/bin/pip install --quiet torch==$(TORCH)
	$(TORCH_VENV)/bin/pip install --quiet torch==$(TORCH) -e '.[dev]'
	$(TORCH_VENV)/bin/python -m pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS) \
	  --result-file tests/results/$(shell date +%F)-torch-$(TORCH).json

# For the tests of the report; without it they are skipped and say so.
browser:
	@command -v chromium >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	  (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium) >/dev/null || \
	  echo "chromium could not be installed"

check: $(READY)
	$(BIN)/ruff format --check $(CODE) setup.py
	$(BIN)/ruff check $(CODE) setup.py
	$(BIN)/mypy $(CODE)

format: $(READY)
	$(BIN)/ruff format $(CODE) setup.py
	$(BIN)/ruff check --fix $(CODE) setup.py

bench: $(READY)
	$(BIN)/python -m benchmarks

# What would be published: sources, and a wheel for this platform.
dist: $(READY)
	$(BIN)/pip install --quiet build
	$(BIN)/python -m build

clean:
	rm -rf .venv .venv-torch-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	rm -f src/loosestep/comm/native/*.so
	find . -name __pycache__ -prune -exec rm -rf {} +

# torch first and pinned to one of the versions that the suite runs on; where a CPU build of it is to be had, this
# takes that one, while a range may choose a newer build with gigabytes of CUDA.
$(READY): pyproject.toml setup.py $(NATIVE)
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -e '.[dev]'
	$(BIN)/python -c 'from loosestep.comm import native; native.loops()' # says so if there are no C loops
	touch $@
