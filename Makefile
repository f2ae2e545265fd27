# Every target makes what it needs, .venv first.  `make help` lists them.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.stamp
RUN := $(VENV)/bin/python
PYTEST := $(RUN) -m pytest -q

# A kind of test is a folder; one that is not there yet is not run.
tests = $(wildcard $(addprefix tests/,$(1)))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check fmt lint type arch unit property sim integration \
	numerics docs examples bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## Make .venv with everything pinned

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e '.[dev,examples]'
	touch $@

demo: $(STAMP) ## Train a model that is split over processes, and watch it
	$(RUN) examples/train_split_model.py

test: $(STAMP) ## Run all tests: five to six minutes, on loopback, without a GPU
	$(PYTEST) $(call tests,unit property simulation integration numerics docs examples)

check: lint type arch ## Lint, types, contracts

fmt: $(STAMP) ## Format, and fix what can be fixed
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

lint: $(STAMP) ## Check style and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

type: $(STAMP) ## Check types
	$(RUN) -m mypy

arch: $(STAMP) ## Check who imports whom, public names, sizes, docstrings
	$(VENV)/bin/lint-imports
	$(PYTEST) tests/architecture

unit: $(STAMP) ## Test the machines and codecs, without a loop
	$(PYTEST) tests/unit

property: $(STAMP) ## Test what must hold for every input
	$(PYTEST) tests/property

sim: $(STAMP) ## Test real workers on virtual time and a hostile network
	$(PYTEST) tests/simulation

integration: $(STAMP) ## Test real sockets and processes
	$(PYTEST) tests/integration

numerics: $(STAMP) ## Test that gradients and steps equal those of one process
	$(PYTEST) tests/numerics

docs: $(STAMP) ## Make api.md; run every code block and follow every link
	$(RUN) docs/make_api.py
	$(PYTEST) tests/docs

examples: $(STAMP) ## Run every example
	$(PYTEST) tests/examples

bench: $(STAMP) ## Measure
	$(RUN) -m tests.bench

clean: ## Remove what was made, .venv too
	rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache \
		.pytest_cache .ruff_cache
	find asyncrpc examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
