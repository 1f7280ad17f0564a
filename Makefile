# Everything needs only Python 3.11 and make; each target builds what it needs first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint bench docs clean

setup: .venv/ready           ## make .venv with everything for development

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup                  ## simulated robots on a real policy, with the batches drawn
	$(BIN)/reflex demo

test: setup                  ## every test, under ten minutes on two cores
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: setup                  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup                 ## the figures of docs/benchmarks.md, about twenty minutes
	$(BIN)/python -m bench

docs: setup                  ## check that the pages tell what is there
	$(BIN)/python -m pytest tests/test_docs.py tests/test_pages.py

clean:
	rm -rf .venv demo-out bench-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
