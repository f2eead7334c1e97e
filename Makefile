SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# A Python 3.9 or newer to make the virtual environment from.
PYTHON ?= python3
# Where the virtual environment lies.
VENV ?= .venv
# The torch to install, as a pip requirement; empty: the newest one tested with that Python.
TORCH ?=
# pytest's own options, e.g. PYTEST="-k radam".
PYTEST ?=

RUN := $(VENV)/bin/python
RECIPE := $(MAKE) --no-print-directory PYTHON=$(RUN)

## make demo: train 18L-18L on a generated German-English corpus and score it (METHOD=post-ln to compare)
.PHONY: demo
demo: $(VENV)/ready
	@$(RECIPE) -f recipes/demo/Makefile

## make multi30k: the same pipeline on Multi30k (PAIR=en-fr, DATA=DIR, PRESET=cpu|gpu, METHOD=, SEED=)
.PHONY: multi30k
multi30k: $(VENV)/ready
	@$(RECIPE) -f recipes/multi30k/Makefile

## make test: lint, types and all tests
.PHONY: test
test: lint
	$(RUN) -m pytest tests -q -rs -n 2 --dist loadfile --timeout 900 $(PYTEST)

## make lint: ruff and mypy only
.PHONY: lint
lint: $(VENV)/ready
	$(RUN) -m ruff check --line-length 120 --select E,W,F,I,B --ignore B905 .
	$(RUN) -m ruff format --check --line-length 120 .
	$(RUN) -m mypy --ignore-missing-imports fairseq_admin

## make bench: what Admin costs beside stock Post-LN in training and folded, CTranslate2's speed, an average's memory
.PHONY: bench
bench: $(VENV)/ready
	$(RUN) recipes/bench/step.py
	$(RUN) recipes/bench/engines.py
	$(RUN) recipes/bench/average.py

## make setup: only the virtual environment
.PHONY: setup
setup: $(VENV)/ready

PIP := $(RUN) -m pip install -q --disable-pip-version-check

# torch first: fairseq-fixed builds against it, and in a build environment of its own pip would fetch a second one.
# Python < 3.11 gets the official fairseq 0.12.2. Its dependencies' metadata needs an older pip and setuptools, and its
# source archive lacks a file that is only compiled where torch is found, so that one is built in isolation.
$(VENV)/ready: setup.py
	@echo "Setting up $(VENV): torch, fairseq and the tools, a few minutes."
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 9) or sys.exit("$(PYTHON) is older than Python 3.9; give PYTHON=")'
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; then \
	  $(PIP) 'pip<24.1' 'setuptools<81' wheel cython 'numpy<1.24' '$(or $(TORCH),torch==2.8.0)'; \
	  $(PIP) fairseq==0.12.2; \
	else \
	  $(PIP) setuptools wheel cython numpy '$(or $(TORCH),torch==2.13.0)'; \
	fi
	@$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

## make clean: remove caches and runs/demo
.PHONY: clean
clean:
	rm -rf runs/demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fairseq_admin recipes tests -name __pycache__ -prune -exec rm -rf {} +

## make distclean: clean, and remove the virtual environment and all runs
.PHONY: distclean
distclean: clean
	rm -rf $(VENV) runs

## make help: this list
.PHONY: help
help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)
