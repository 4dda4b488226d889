# rlsync: what `make` can do. Everything needs only Python, pip and make.
#
#   make train         makes .venv when there is none, then trains PPO on CartPole-v1
#   make test          makes .venv with the dev extras, then runs the tests: every law and every fault at least once
#   make test-all      all tests, also the long storms, whole products of parameters and runs that learn
#   make test-touched  what `make test` leaves out, of the folders of tests that this branch concerns
#   make test-quick    the short tests that start no process, for the time between two edits
#   make test-plug     the tests of the plug, in an environment of its own without hydra, omegaconf, rich and what only runs
#                      need; plug-tests runs them in the present VENV
#   make same          compares short runs of every recipe, and a few publishes, with those of the merge base with main
#   make check         all checks but the tests: format, lint, types, floors and docs, each also a target of its own
#   make docs          builds the documentation into docs/_build/html
#   make claims        runs what proves each promise of docs/reliability.md, and writes its table
#   make configs       writes default values and comments of configs/ from the dataclasses
#   make notebooks  runs docs/notebooks, and keeps what they print in them
#   make wheel         builds the wheel into dist/, to install rlsync elsewhere
#   make hooks         lets git run the quick checks at every commit
#   make compat        the tests that depend on TorchRL, with the lowest and the highest version that is supported;
#                      compat-lowest and compat-highest run one of the two, compat-tests those of the present .venv
#   make compat-next   the plug and the recipes with the nightly builds of compat/next.txt; what may fail there, and why,
#                      is in compat/next_fails.txt, and what differs from that is said; next-tests runs it in the present VENV
#   make breadth       a short set of tests with other versions of Python, torch, gymnasium and numpy, and the table of
#                      docs/compatibility.md; ROWS=3.13 runs the rows with this text
#   make clean         removes the virtual environments, built files and caches
#   make help          prints this
#
#   PYTHON=python3.12      which interpreter makes the virtual environment
#   VENV=.venv             where it goes
#   TORCH_INDEX=URL        a package index to take torch from, for example the CPU-only one of pytorch.org
#   CONSTRAINTS=FILE       the versions to install
#   ARGS='...'             overrides for `make train`, options for `make test`, `make test-quick`, `make compat`
#   JOBS=3                 how many processes run tests side by side; 0 runs them in one, for a debugger. `make test-quick`
#                          takes one for each core
#   BUDGET_S=300           seconds after which `make test-touched` begins no test, and names those that are left

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
CONSTRAINTS ?= constraints.txt
ARGS ?=
# One more than the two cores of a small machine: many tests wait for a timeout, and the others go on meanwhile.
JOBS ?= 3
BUDGET_S ?= 300

BIN := $(VENV)/bin
SIDE_BY_SIDE = -n $(JOBS) --dist worksteal
# In a terminal pip shows what it does; elsewhere its lines would only fill a log.
PIP := $(BIN)/python -m pip --disable-pip-version-check install $$([ -t 1 ] || echo --quiet) -c $(CONSTRAINTS)

# A recipe that fails leaves no stamp behind, so the next call starts again where this one stopped.
.DELETE_ON_ERROR:
.PHONY: help train test test-all test-touched test-quick test-plug plug-tests same check format lint types floors docs claims configs notebooks wheel hooks \
	clean compat compat-lowest compat-highest compat-tests compat-next next-tests breadth

help:
	@sed -n '/^#/!q;p' Makefile

train: $(VENV)/.stamp-run
	$(BIN)/rlsync train $(ARGS)

# What Python has compiled is kept, whatever the environment says: tests start hundreds of processes, and each would
# compile all modules anew.
test test-all test-touched test-quick same: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not thorough' $(ARGS)

test-all: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)
	@$(MAKE) --no-print-directory compat-next

# In the order of the folders (--dist load): what has changed most comes first. pytest says 5 where it finds no test: a folder may have none that is thorough.
test-touched: $(VENV)/.stamp-dev
	@folders=$$($(BIN)/python .ci/touched.py) && echo "thorough tests of: $${folders:-nothing}" && \
	if [ -n "$$folders" ]; then $(BIN)/python -m pytest -n $(JOBS) --dist load \
	-m thorough --budget-s $(BUDGET_S) $(ARGS) $$folders || [ $$? = 5 ]; fi

# These wait for nothing: a process for each core is enough, and each one more would load torch and all tests again.
test-quick: JOBS = $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2)
test-quick: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not processes and not slow and not seconds and not thorough' $(ARGS)

PLUG_TESTS := tests/core tests/tensors tests/transport tests/sync tests/torchrl_plugin tests/record

test-plug:
	@$(MAKE) --no-print-directory plug-tests VENV=.compat/plug

plug-tests: $(VENV)/.stamp-plug
	PYTHONPATH=$(CURDIR) $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not thorough' $(PLUG_TESTS) $(ARGS)

same: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.laws.same $(ARGS)

# Says everything that is wrong, not only the first of it. Docs and types take longest, and run side by side.
check: $(VENV)/.stamp-dev
	@$(MAKE) --no-print-directory --keep-going --jobs 2 --output-sync=target docs types format lint floors

format: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .

# Then what a user writes, from the folder of the cases and without our config: to a user rlsync is an installed package. An
# ignored mistake that is not made any more is an error, too.
types: $(VENV)/.stamp-dev
	$(BIN)/mypy
	cd tests/project/typing_cases && $(abspath $(BIN))/mypy --strict --config-file= \
	--cache-dir=$(CURDIR)/.mypy_cache/typing_cases .

floors: $(VENV)/.stamp-dev
	$(BIN)/lint-imports

# -E: a page that is taken from the cache would not repeat its warnings, and a second call would pass.
docs: $(VENV)/.stamp-dev
	$(BIN)/python -m sphinx -E -W --keep-going -q -b html docs docs/_build/html

# A promise that is not proven is not printed.
claims: $(VENV)/.stamp-dev
	$(BIN)/python docs/claims.py $(ARGS) -- $(SIDE_BY_SIDE)

# Default values and comments in configs/, from the dataclasses.
configs: $(VENV)/.stamp-dev
	$(BIN)/python docs/configs.py

notebooks: $(VENV)/.stamp-dev
	$(BIN)/python docs/notebooks.py

wheel: | $(BIN)/python
	$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/rlsync-*.whl

# The hooks of .pre-commit-config.yaml, at every commit.
hooks: $(VENV)/.stamp-dev
	$(BIN)/pre-commit install

# What leans on TorchRL, with the lowest and the highest versions that pyproject.toml allows, each in an environment of
# its own. A version that cannot be had is a failure.
COMPAT_TESTS := tests/stock tests/laws/test_canary.py tests/runs/cli/test_torchrl_configs.py tests/project/test_public_api.py \
	$(patsubst %,tests/torchrl_plugin/test_%.py,descriptors forms layouts maps resolve resume sync_weights workers \
	update_weights their_collectors policy_lag staleness verify watch_workers)

compat: compat-lowest compat-highest

compat-lowest compat-highest: compat-%:
	@$(MAKE) --no-print-directory compat-tests VENV=.compat/$* CONSTRAINTS=compat/$*.txt

compat-tests: $(VENV)/.stamp-dev
	@$(BIN)/python -m pip --disable-pip-version-check freeze | grep -E '^(torch|torchrl|tensordict)='
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m 'not slow' $(COMPAT_TESTS) $(ARGS)

NEXT_TESTS := tests/stock tests/laws/test_canary.py $(PLUG_TESTS) tests/runs/recipes tests/runs/cli/test_endings.py \
	tests/runs/cli/test_torchrl_configs.py

compat-next:
	@$(MAKE) --no-print-directory next-tests VENV=.compat/next CONSTRAINTS=compat/next.txt

next-tests: $(VENV)/.stamp-next
	$(BIN)/python .ci/compat_next.py $(SIDE_BY_SIDE) -m 'not thorough' $(NEXT_TESTS) $(ARGS)

BREADTH_TESTS := tests/stock tests/laws/test_canary.py tests/torchrl_plugin/test_sync_weights.py \
	tests/torchrl_plugin/test_staleness.py tests/runs/actors/test_envs.py tests/runs/recipes/test_recipes.py \
	tests/runs/recipes/test_spaces.py

breadth:
	$(PYTHON) .ci/breadth.py $(SIDE_BY_SIDE) -q -m 'not thorough and not slow' $(BREADTH_TESTS) $(ARGS)

clean:
	rm -rf $(VENV) .compat docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# torch goes first and by itself: it is by far the largest download, and nothing after it can choose another build.
$(VENV)/.stamp-torch: $(CONSTRAINTS) | $(BIN)/python
	@echo "installing torch into $(VENV): 192 MB to download if it is CPU-only, some GB with CUDA; this can take minutes"
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

# rlsync itself is not installed there, for its wheel brings what runs need.
PLUG_NEEDS := torchrl tensordict gymnasium psutil packaging pytest pytest-xdist pytest-timeout hypothesis pyyaml
$(VENV)/.stamp-plug: $(VENV)/.stamp-torch
	@$(PIP) $(PLUG_NEEDS)
	@touch $@

# The nightly builds put their files where those of the releases are, and need a tensordict that is called otherwise.
$(VENV)/.stamp-next: $(VENV)/.stamp-dev compat/next.txt
	@$(BIN)/python -m pip --disable-pip-version-check uninstall --quiet --yes torchrl tensordict
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall \
	$$(grep nightly= compat/next.txt)
	@touch $@

$(VENV)/.stamp-run: pyproject.toml $(VENV)/.stamp-torch
	@echo "installing rlsync with TorchRL into $(VENV): some tens of MB"
	@$(PIP) -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-torch
	@echo "installing rlsync with its dev extras into $(VENV): some hundred MB"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.stamp-run
