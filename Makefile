# `make train` trains, `make test` tests; both need nothing but Python, pip and make.
#
#   PYTHON=python3.12      which interpreter makes the virtual environment
#   VENV=.venv             where it goes
#   TORCH_INDEX=URL        a package index to take torch from, for example the CPU-only one of pytorch.org
#   ARGS='...'             overrides for `make train`, options for `make test`

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# A recipe that fails leaves no stamp behind, so the next call starts again where this one stopped.
.DELETE_ON_ERROR:
.PHONY: help train test check format lint types floors docs clean

help:
	@sed -n '1,6p' Makefile

train: $(VENV)/.stamp-run
	$(BIN)/rlsync train $(ARGS)

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(ARGS)

check: format lint types floors docs

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

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and by itself: it is by far the largest download, and nothing after it can choose another build.
$(VENV)/.stamp-torch: constraints.txt | $(BIN)/python
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

$(VENV)/.stamp-run: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-torch
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.stamp-run
