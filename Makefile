# Every target sets up what it needs: a virtual environment in .venv, and Debian packages where we are root.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete

# Where bytecode is not written, each server and client that a test starts compiles the whole product again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup system demo check check-types check-users check-docs format test test-long bench docs site packages clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## the virtual environment with everything the checks and tests use

$(STAMP): setup.cfg pyproject.toml tools/constraints.txt tools/setup.sh
	@PYTHON="$(PYTHON)" bash tools/setup.sh

system: ## Debian packages that the crash rigs use (says which; skipped without root)
	@bash tools/setup_system.sh

demo: setup ## the first run: send, kill -9 in the middle, restart, count
	@$(BIN)/python -m tools.demo

check: setup ## format, lint, types, import contracts, docs and their site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-users check-types check-docs

check-types: setup
	$(BIN)/mypy journal tfmq pyspark_tfmq tools

check-users: setup
	$(BIN)/python -m tools.check_types

check-docs: setup
	$(BIN)/lint-imports --config setup.cfg
	$(BIN)/python tools/generate_docs.py --check
	$(BIN)/python -m tools.docs_site

format: setup ## rewrite the code in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Three workers for two cores, as most tests wait for processes and disks. A file's tests stay together, and the
# files come in the order of tests/conftest.py.
test: setup system ## the tests, with a seeded fraction of each count
	TFMQ_TEST_SCALE=$${TFMQ_TEST_SCALE:-0.03} $(BIN)/python -m pytest tests -n 3 --dist loadfile --no-loadscope-reorder

# Three workers, as these tests wait for half of their time, and in the order of the folders: with the files of
# few tests at the end, the longest test of all would begin last and run alone. A failed test does not keep the
# planted bugs from being tried: a run takes hours, so it gives both results.
test-long: setup system ## the tests with the full counts, then every planted bug, with the results in tests/planted-bugs.md (hours)
	status=0; \
	TFMQ_TEST_SCALE=1 $(BIN)/python -m pytest tests -v -n 3 --dist loadfile --no-loadscope-reorder --timeout 3600 --durations 60 || status=1; \
	$(BIN)/python -m tools.mutants --jobs 3 --no-baseline --markdown || status=1; \
	exit $$status

bench: setup ## the benchmarks of docs/performance.md, without peers
	$(BIN)/python -m tools.bench

docs: setup ## write the generated reference pages again
	$(BIN)/python tools/generate_docs.py

site: setup ## the docs with a search, in build/site
	$(BIN)/python -m tools.docs_site

packages: setup ## wheel and source archive in build/packages
	$(BIN)/python -m build --no-isolation --outdir build/packages .

clean: ## remove what the targets above made
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
