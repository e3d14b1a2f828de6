# Every target makes what it needs, in .venv, on a machine with Python 3.10 or newer and a package index.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test quick check
.DEFAULT_GOAL := help

help:
	@echo "make demo    train a small GPT with several strategies on two processes; table and picture"
	@echo "make test    run all tests"
	@echo "make quick   run the tests that are not marked slow"
	@echo "make check   lint, formatting, types, spelling, docstrings against signatures"
	@echo "PYTHON=...   the Python that .venv is made with (now: $(PYTHON))"

demo: .venv/.stamp
	$(BIN)/python examples/train_gpt.py

test: .venv/.stamp
	$(BIN)/python -m pytest

quick: .venv/.stamp
	$(BIN)/python -m pytest -m "not slow"

check: .venv/.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/python -m pytest --quiet tests/test_docs.py -k "documented or explain or references or tables or links"

# The pinned requirements come first: they, not the ranges of the package, decide what is installed.
.venv/.stamp: requirements/dev.txt pyproject.toml
	@command -v "$(PYTHON)" >/dev/null || { echo "No '$(PYTHON)' here. Install Python 3.10 or newer, or run make PYTHON=/path/to/python3."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, and $(PYTHON) is " + sys.version.split()[0] + ". Run make PYTHON=/path/to/a/newer/python3.")'
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
