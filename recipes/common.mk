# What every recipe shares. Its Makefile includes this first.
#
# Reads PYTHON, RUNS and TRAIN_ARGS. Gives the shell's flags, STEP (a step of recipes/steps), METHODS (the plugin's schemes),
# and what several rules do alike: field, one-of, some-of, quoted, binarise, GUARD.

# First of all, and in words that make 3.81, which macOS has, can read. Grouped targets came with 4.3.
$(if $(filter grouped-target,$(.FEATURES)),,$(error GNU make $(MAKE_VERSION) is here; 4.3 or newer is needed: on macOS, brew install make, then gmake in place of make))
$(if $(wildcard recipes/common.mk),,$(error recipes/common.mk is not here ($(CURDIR)); run make from the repository's root))
include recipes/paths.mk

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all
.PHONY: FORCE

PYTHON ?= .venv/bin/python
# Everything written goes under this folder.
RUNS ?= runs
# More options for fairseq-train, after the recipe's own.
TRAIN_ARGS ?=

export PYTHONUNBUFFERED := 1
# Text is UTF-8, whatever the locale says.
export PYTHONUTF8 := 1
# Threads that wait for one another spin for a moment, as long as most waits are, and then sleep: those that only spin are
# many times slower on a machine that is busy, and those that only sleep slower on one that is not (docs/results.md).
ifeq ($(origin OMP_WAIT_POLICY),undefined)
export OMP_WAIT_POLICY := PASSIVE
export GOMP_SPINCOUNT ?= 3000
endif
# Memory comes in pages of 2 MB, where Linux and glibc (2.35 or newer) have them: on a CPU a small model's update takes less
# time, and a large one's no more (docs/bench/pages.csv).
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
# Warnings of fairseq and its libraries about one another: nothing the user can fix.
export PYTHONWARNINGS ?= ignore
STEP := $(PYTHON) -m recipes.steps
# The steps that make asks before it plans need no more than the standard library, so a plan can be printed before there
# is an environment.
ASK := $(or $(wildcard $(PYTHON)),python3) -m recipes.steps

# $(call field,NAME,words): the values of NAME among words NAME=VALUE, as steps hand them over.
field = $(patsubst $(1)=%,%,$(filter $(1)=%,$(2)))
# $(call one-of,NAME,choices) and some-of: refuse a variable that is not one, or some, of the choices.
one-of = $(if $(and $(filter 1,$(words $($(1)))),$(filter $($(1)),$(2))),,$(error $(1)=$($(1)) is unknown; expected one of $(2)))
some-of = $(if $(or $(filter-out $(2),$($(1))),$(if $(strip $($(1))),,none)),$(error $(1)=$($(1)) is unknown; expected some of $(2)))
# What the user gave as a number is one, above 0; what is to be tried is named once.
COUNTS := UPDATES EPOCHS SAVE_EVERY LOG_EVERY AVERAGE MAX_TOKENS UPDATE_FREQ TOKENS GPUS NODES JOBS LAYERS WIDTH FFN HEADS MERGES BEAM LEG \
	SHORT CONTEXT PAIRS VALID_PAIRS TEST_PAIRS WORDS PRETRAIN EXAMPLES HELD_OUT ENCODER_LAYERS ENCODER_UPDATES ENCODER_SAVE_EVERY
AXES := SCHEMES DEPTHS RATES SEEDS LRS BETA2S WARMUPS OPTIMIZERS ADAM_LRS SGD_LRS
without-digits = $(subst 0,,$(subst 1,,$(subst 2,,$(subst 3,,$(subst 4,,$(subst 5,,$(subst 6,,$(subst 7,,$(subst 8,,$(subst 9,,$(1)))))))))))
counts = $(if $(call without-digits,$(1))$(filter 0%,$(1)),,yes)
$(foreach name,$(COUNTS),$(if $(strip $($(name))),$(if $(call counts,$($(name))),,$(error $(name)=$($(name)) is not a number that a run can have; expected a whole one above 0, as in 1000))))
# Other numbers, in lists too: whole ones of 0 or more; and others, of which SHARES are below 1.
WHOLE := SEED WARMUP SEEDS WARMUPS
SHARES := DROPOUT ATTENTION_DROPOUT ACTIVATION_DROPOUT LABEL_SMOOTHING BETA2S
NUMBERS := $(SHARES) LR CLIP_NORM WEIGHT_DECAY LENPEN PRICE MEMORY RATES LRS ADAM_LRS SGD_LRS
is-number = $(and $(filter-out .,$(1)),$(filter 0% 1% 2% 3% 4% 5% 6% 7% 8% 9% .%,$(1)),$(filter x x. xe x.e xe- x.e-,x$(call without-digits,$(1))))
is-share = $(and $(filter 0 0.% .% %e-%,$(1)),$(is-number))
# $(call each,function,names,what is expected): of the variables that are there, every word; those not in AXES have one.
each = $(foreach name,$(2),$(if $(filter undefined,$(origin $(name))),,$(if $(strip \
	$(if $(filter $(name),$(AXES)),,$(filter-out 1,$(words $($(name))))) \
	$(foreach word,$($(name)),$(if $(call $(1),$(word)),,no))),$(error $(name)=$($(name)) is not a number that a run can have; expected $(3)))))
is-whole = $(if $(call without-digits,$(1)),,yes)
$(call each,counts,DEPTHS,a whole one above 0 (as 18))
$(call each,is-whole,$(WHOLE),a whole one of 0 or more (as 100))
$(call each,is-share,$(SHARES),one of 0 or more and below 1 (as 0.1))
$(call each,is-number,$(NUMBERS),one of 0 or more (as 0.001 or 1e-3))
$(foreach name,$(AXES),$(if $(or $(filter undefined,$(origin $(name))),$(strip $($(name)))),,$(error $(name)= is empty; expected one or more)))
$(foreach name,$(AXES),$(if $(filter-out $(words $($(name))),$(words $(sort $($(name))))),$(error $(name)=$($(name)) names one twice; expected each once)))
# $(call a-multiple,WIDTH,HEADS): refuse a variable that is not one of the other.
a-multiple = $(if $(filter 0,$(shell echo $$(( $($(1)) % $($(2)) )))),,$(error $(1)=$($(1)) is not a multiple of $(2)=$($(2)); expected one. Give another $(1) or $(2)))
# $(call quoted,text): one word for the shell.
quoted = '$(subst ','\'',$(strip $(1)))'

# $(call binarise,options of fairseq-preprocess,rest of the line): the target's folder, whole or not at all.
define binarise
rm -rf $(@D) $(@D).part
$(PYTHON) -m fairseq_cli.preprocess $(1) --destdir $(@D).part $(2)
mv $(@D).part $(@D)
endef

PLANNING := $(findstring n,$(firstword -$(MAKEFLAGS)))
GUARD = $(if $(PLANNING),,$(STEP).guard $(1) --) $(MAKE) --no-print-directory -f $(firstword $(MAKEFILE_LIST)) GUARDED=yes
# The table of fairseq_admin/method/schemes.py.
TABLE_OF_SCHEMES := $(shell $(ASK).plugin)
$(if $(TABLE_OF_SCHEMES),,$(error $(ASK).plugin printed nothing; expected the schemes of fairseq_admin/method/schemes.py))
METHODS := $(call field,SCHEME,$(TABLE_OF_SCHEMES))

# How feed-forward weights start, in every method: as in the fairseq of the papers, or as in today's (stock). A comparison is
# fair only if all have the same.
FFN_INIT ?= xavier
$(call one-of,FFN_INIT,xavier stock)
