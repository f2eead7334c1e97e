# GNU make 3.81, which macOS has, or newer. (3.81 does not know .SHELLFLAGS; no recipe relies on them.)
export PYTHONUTF8 := 1
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Python 3.11 or newer for the virtual environment; empty: the one of last time, else python3.12 if it is there, or python3.
PYTHON ?=
# The folder of the virtual environment.
VENV ?= .venv
$(if $(filter-out 1,$(words $(VENV))),$(error VENV=$(VENV) is not one word; expected a folder without spaces in its name))
# The torch to install: a build (recipes/set_up.py) or a pip requirement; empty: the one of last time, or by the card.
TORCH ?=
# pytest's own options, e.g. PYTEST="-k radam".
PYTEST ?=
# The sizes for make bench, each LAYERS[-DECODER_LAYERS]:WIDTH:TOKENS; empty: three sizes, the largest 18:512:1024.
SIZES ?=

RUN := $(VENV)/bin/python
# The targets of `python -m recipes`. A recipe of one model has targets for its steps, such as make demo-train.
MODELS := demo multi30k own lm-demo \
	iwslt14 $(addprefix wmt14-,ende-6l ende-12l ende-18l ende-100l enfr-6l enfr-60l enfr-60l-deepnmt)
STEPS := preflight text prepare train average generate score
FRONTED := $(MODELS) compare sensitivity warmup deeper $(foreach step,$(STEPS),$(MODELS:%=%-$(step)))
.PHONY: $(FRONTED) preflight gpu-trial table figures docs test test-nightly lint release bench setup lock clean distclean help

## make demo: train 18L-18L on a generated German-English corpus and score it (METHOD=post-ln to compare)
## make multi30k: the same pipeline on Multi30k (PAIR=en-fr, DATA=DIR, PRESET=cpu|gpu, METHOD=, SEED=)
## make own DATA=DIR PAIR=de-en: the same pipeline on a parallel text of your own (train.de, train.en, valid and test alike)
## make iwslt14: the paper's IWSLT'14 De-En, from download to a score (METHOD=, SEED=, ARGS="--lr 5e-4", GPUS=, PRESET=small)
## make wmt14-ende-6l, -12l, -18l, -100l: the papers' WMT'14 En-De by depth (WHERE=slurm NODES= GPUS=)
## make wmt14-enfr-6l, -60l, -60l-deepnmt: the papers' WMT'14 En-Fr, 6L-6L and 60L-12L
## make demo-prepare, -train, -average, -generate, -score: one step and what it needs; any recipe of one model likewise
## make lm-demo: an 18-layer language model on Python's own documentation (METHOD=post-ln to compare)
## make compare: every residual scheme at its best learning rate (SCHEMES=, RATES=, DEPTHS=, SEEDS=, JOBS=, ARGS=, PRESET=)
## make sensitivity: the learning rates and beta2 at which a scheme trains without warm-up (SCHEMES=, LRS=, BETA2S=, JOBS=, PRESET=)
## make warmup: the warm-up that each scheme needs, by peak rate, with Adam and SGD (SCHEMES=, WARMUPS=, ADAM_LRS=, SGD_LRS=, PRESET=quick)
## make deeper: new layers on a pre-trained encoder, by depth and scheme, DT-Fixup among them (SCHEMES=, DEPTHS=, DATA=, PRESET=quick)
$(FRONTED): $(VENV)/ready
# make passes its variables on in the environment. Under make -n, this command runs too (+), and prints the recipe's commands.
	+@if test -x $(RUN); then exec $(RUN) -m recipes $@; else echo "make setup comes first: $(RUN) is not here."; fi

## make preflight RECIPE=wmt14-ende-18l: can a recipe work here, and what space does it take (or iwslt14-preflight)
preflight: $(VENV)/ready
	+@exec $(RUN) -m recipes $(or $(RECIPE),$(error RECIPE= is missing; expected a recipe, as in make preflight RECIPE=demo))-preflight

## make gpu-trial: the time of a step on a GPU, and the card's best (DEVICE=cpu to try it with tiny sizes)
gpu-trial: $(VENV)/ready
	@$(RUN) -m recipes.research.bench.trial

## make table: all results so far next to the papers' numbers
table: $(VENV)/ready
	@$(RUN) -m recipes.results_table "$${RUNS:-runs}"

## make figures: the figures of README.md and docs/, and the tables of docs/results.md, from the rows that docs/ keeps
figures: $(VENV)/ready
	@$(RUN) -m recipes.research.figures

## make docs: the site of docs/ in site/, with every link and image checked
docs: $(VENV)/ready
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

## make test: lint, types and all tests but the nightly ones
test: lint
	$(RUN) -m pytest -n 2 --dist loadfile -m 'not nightly' $(PYTEST)

## make test-nightly: the tests that take minutes, or that train until a model learns
test-nightly: $(VENV)/ready
	$(RUN) -m pytest -n 2 --dist loadfile -m nightly $(PYTEST)

## make lint: ruff, mypy and the schemas of .github only
lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(RUN) -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(RUN) -m mypy

## make release: a wheel and an sdist in dist/, checked, and the wheel tried in an empty environment outside the clone, alone and with fairseq
release: $(VENV)/ready
	rm -rf dist
	$(RUN) -m build
	$(RUN) -m twine check --strict dist/*
	PYTHON=$(abspath $(RUN)) tests/release.sh dist/*.whl

## make bench: the cost of Admin next to stock Post-LN, fast and plain (SIZES=: that alone), the host time of a GPU's step, and an attached BERT's
bench: $(VENV)/ready
	$(RUN) -m recipes.research.bench.speed $(if $(SIZES),--sizes $(SIZES)) --csv "$${RUNS:-runs}/bench/speed.csv"
	$(if $(SIZES),,$(RUN) -m recipes.research.bench.speed --host --csv "$${RUNS:-runs}/bench/host.csv")
	$(if $(SIZES),,$(RUN) -m recipes.research.bench.attached --csv "$${RUNS:-runs}/bench/attached.csv")

## make setup: only the virtual environment (TORCH=cpu|cuda|cu126 or pip's torch==..., PYTHON=, VENV=)
setup: $(VENV)/ready
FORCE:
$(VENV)/ready: FORCE
	@$(or $(PYTHON),python3) -m recipes.set_up $(VENV) '$(TORCH)' '$(PYTHON)'

## make lock: requirements.lock again, with the newest versions of everything but torch
lock: $(VENV)/ready
	$(RUN) -m uv pip compile -q setup.py --extra dev --universal --python-version 3.11 --python $(RUN) --no-build-isolation \
	  --overrides recipes/unlocked.txt --generate-hashes --no-annotate --no-header --upgrade -o requirements.lock

## make clean: remove caches and runs/demo
clean:
	rm -rf runs/demo build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find fairseq_admin recipes tests -name __pycache__ -prune -exec rm -rf {} +

## make distclean: clean, and remove the virtual environment and all runs
distclean: clean
	$(if $(wildcard $(VENV)/pyvenv.cfg),rm -rf $(VENV))
	rm -rf runs

## make help: this list; make help TARGET=demo: a target's settings
help: $(if $(TARGET),$(VENV)/ready)
	@$(if $(TARGET),$(RUN) -m recipes $(TARGET) --help,sed -n 's/^## //p' $(MAKEFILE_LIST))
