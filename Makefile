# `make train` trains, `make test` tests; both need nothing but Python, pip and make.
# `make test-quick` runs the short tests that start no process: for the time between two edits.
# `make check` runs all checks but the tests, `make compat` tests the ends of the range of TorchRL versions.
#
#   PYTHON=python3.12      which interpreter makes the virtual environment
#   VENV=.venv             where it goes
#   TORCH_INDEX=URL        a package index to take torch from, for example the CPU-only one of pytorch.org
#   CONSTRAINTS=FILE       the versions to install
#   ARGS='...'             overrides for `make train`, options for `make test`, `make test-quick`, `make compat`
#   JOBS=3                 how many processes run tests side by side; 0 runs them in one, for a debugger

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt
ARGS ?=
# One more than the two cores of a small machine: many tests wait for a timeout, and the others go on meanwhile.
JOBS ?= 3

BIN := $(VENV)/bin
SIDE_BY_SIDE := -n $(JOBS) --dist worksteal
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS)

# A recipe that fails leaves no stamp behind, so the next call starts again where this one stopped.
.DELETE_ON_ERROR:
.PHONY: help train test test-quick check format lint types floors docs hooks clean \
	compat compat-lowest compat-highest compat-tests

help:
	@sed -n '/^#/!q;p' Makefile

train: $(VENV)/.stamp-run
	$(BIN)/rlsync train $(ARGS)

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-quick: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not processes and not slow and not seconds' $(ARGS)

# Says everything that is wrong, not only the first of it.
check: $(VENV)/.stamp-dev
	@$(MAKE) --no-print-directory --keep-going format lint types floors docs

format: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .

types: $(VENV)/.stamp-dev
	$(BIN)/mypy

floors: $(VENV)/.stamp-dev
	$(BIN)/lint-imports

# -E: a page that is taken from the cache would not repeat its warnings, and a second call would pass.
docs: $(VENV)/.stamp-dev
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html docs docs/_build/html

# The hooks of .pre-commit-config.yaml, at every commit.
hooks: $(VENV)/.stamp-dev
	$(BIN)/pre-commit install

# What leans on TorchRL, with the lowest and the highest versions that pyproject.toml allows, each in an environment of
# its own. A version that cannot be had is a failure.
COMPAT_TESTS := tests/stock tests/faults $(patsubst %,tests/test_%.py,public_api canary resolve sync_weights \
	update_weights their_collectors policy_lag staleness verify watch_workers torchrl_configs)

compat: compat-lowest compat-highest

compat-lowest compat-highest: compat-%:
	@$(MAKE) --no-print-directory compat-tests VENV=.compat/$* CONSTRAINTS=compat/$*.txt

compat-tests: $(VENV)/.stamp-dev
	@$(BIN)/python -m pip --disable-pip-version-check freeze | grep -E '^(torch|torchrl|tensordict)='
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow' $(COMPAT_TESTS) $(ARGS)

clean:
	rm -rf $(VENV) .compat docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and by itself: it is by far the largest download, and nothing after it can choose another build.
$(VENV)/.stamp-torch: $(CONSTRAINTS) | $(BIN)/python
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.stamp-run: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.stamp-run
