# Each target that needs packages makes the virtual environment and installs them first; the second call finds them there.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
INSTALL := $(PIP) install --no-build-isolation --constraint constraints.txt --editable

# The processes that tests start read compiled modules, also where the environment says to write none.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo check test test-all lint format types imports docs pytest fuzz bench clean

help: ## List the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | while IFS='|' read -r name text; \
		do printf '  make %-8s %s\n' "$$name" "$$text"; done

demo: $(VENV)/.demo ## Run the demo: a photograph through a chain of functors in one launch
	$(BIN)/python examples/photo.py

check: lint types imports ## Run what needs no compiler: style, types, imports, tests of text
	$(BIN)/pytest -n $(JOBS) --dist worksteal --tier 1 $(ARGS)

test: lint types imports docs pytest ## Run style, types, imports, docs and the tests, kernels included

test-all: lint types imports docs ## Run everything, as before a release: every architecture, every sample, random examples
	$(BIN)/pytest -n $(JOBS) --dist worksteal --tier 3 $(ARGS)
	$(MAKE) fuzz

lint: $(VENV)/.dev ## Check style and formatting with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev ## Check types with mypy --strict
	$(BIN)/mypy --strict fuser tests/typed_use.py

imports: $(VENV)/.dev ## Check the direction of imports between the stages
	$(BIN)/lint-imports

docs: $(VENV)/.dev ## Build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pytest: $(VENV)/.dev ## Run the tests on JOBS processes (2 unless told); ARGS passes options on
	$(BIN)/pytest -n $(JOBS) --dist worksteal $(ARGS)

fuzz: $(VENV)/.dev ## Run the property tests at random and for long
	HYPOTHESIS_PROFILE=fuzz $(BIN)/pytest -n $(JOBS) --dist worksteal --tier 3 -m hypothesis $(ARGS)

bench: $(VENV)/.bench ## Measure fuser beside its peers; ARGS passes options on (--help lists them)
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.partition

clean: ## Remove the virtual environment and everything the other targets wrote
	rm -rf $(VENV) build dist site .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache *.egg-info
	rm -rf examples/output
	find fuser tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.demo $(VENV)/.dev $(VENV)/.bench: $(VENV)/.%: pyproject.toml constraints.txt fuser/_version.py fuser/_launcher.c | $(BIN)/python
	@echo "installing the $* packages into $(VENV) (a few minutes the first time)"
	$(PIP) install --constraint constraints.txt --upgrade setuptools
	$(INSTALL) '.[$*]'
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fuser needs Python 3.11 or newer; set PYTHON")'
	$(PYTHON) -m venv $(VENV)
