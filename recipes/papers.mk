# What the papers' recipes share: the optimisation of their tables, the small preset that shows a recipe at work on a CPU,
# and the archives. A recipe includes this before its own settings.

PRESET ?= paper
ifeq ($(and $(filter 1,$(words $(PRESET))),$(filter paper small,$(PRESET))),)
$(error PRESET=$(PRESET) is unknown; expected paper, or small: a tiny model on a CPU)
endif

ifeq ($(PRESET),small)
ENCODER_LAYERS ?= 3
DECODER_LAYERS ?= 3
WIDTH ?= 32
FFN ?= 64
HEADS ?= 2
TOKENS ?= 2048
A_DEVICE ?= 2048
GPUS := 1
LR ?= 0.002
WARMUP ?= 50
EPOCHS ?= 3
AVERAGE ?= 2
SAVE_EVERY ?= 50
LOG_EVERY ?= 10
DEVICE_ARGS := --cpu --num-workers 0
GENERATE_ARGS := --cpu
PRECISION := fp32
else
WIDTH ?= 512
SAVE_EVERY ?= 2000
LOG_EVERY ?= 100
AVERAGE ?= 10
DEVICE_ARGS := --num-workers 2 --required-seq-len-multiple 8
# V100s have no bf16; newer cards do, with PRECISION=bf16. me-fp16 takes half the memory a parameter.
PRECISION ?= fp16
CHECK_GPUS := yes
endif
CLIP_NORM ?= 0.0
DROPOUT ?= 0.1
ATTENTION_DROPOUT ?= 0.1
ACTIVATION_DROPOUT ?= 0.1
CLEAN ?=

# A folder with the archives, or with what is in them, instead of a download.
DATA ?=
# Take the archives from this address instead of those in recipes/archives.tsv.
URL ?=
# And hold them to another table of sizes and checksums.
TABLE ?=
# What to do with bytes that are not UTF-8: refuse, or replace.
INVALID ?= refuse
# An archive in DATA is held to the table as a download is.
EXTRACT_ARGS = --invalid $(INVALID) $(if $(DATA),--check $(or $(TABLE),recipes/archives.tsv))
