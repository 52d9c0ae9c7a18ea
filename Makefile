# make demo    train, resume and look at a report: the first thing to type
# make test    lint, types and every test that needs no GPU
# make lint    ruff and mypy only
# make bench   the benchmarks of benchmarks/, as ratios
# make docs    run the examples and build the pages of docs/build
SHELL := /bin/bash
PYTHON ?= python3
TORCH ?= $(shell grep '^torch==' constraints.txt)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -qq -c constraints.txt

.PHONY: demo test test-all lint bench docs clean

demo: .venv/demo.stamp
	@$(BIN)/headrace demo

test: lint
	$(BIN)/python -m pytest -m "not gpu and not slow and not network"

test-all: lint
	$(BIN)/python -m pytest

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/test.stamp
	@set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python $$file; done

docs: .venv/test.stamp
	$(BIN)/python docs/build.py

clean:
	rm -rf .venv docs/build runs

.venv/base.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Headrace needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	@echo "making .venv and installing torch (one to two minutes the first time)"
	@$(PYTHON) -m venv .venv
	@$(PIP) '$(TORCH)'
	@touch $@

.venv/demo.stamp: .venv/base.stamp pyproject.toml constraints.txt
	@echo "installing headrace and what its report needs"
	@$(PIP) -e '.[report]'
	@touch $@

.venv/test.stamp: .venv/base.stamp pyproject.toml constraints.txt
	@echo "installing headrace with every extra and the tools of its tests"
	@$(PIP) -e '.[all,dev]'
	@touch $@ .venv/demo.stamp
