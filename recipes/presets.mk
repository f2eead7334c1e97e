# The two presets of a recipe on a text of modest size: gpu, and cpu for a machine without one.
#
# Reads PRESET; not given or empty, it is by what is there. Gives PRESET, and what is the same in every such recipe. A recipe
# includes this before its own settings.

ifeq ($(PRESET),)
override PRESET := $(shell $(PYTHON) -c 'import torch; print("gpu" if torch.cuda.is_available() else "cpu")')
endif
ifeq ($(PRESET),gpu)
WIDTH ?= 512
AVERAGE ?= 10
else ifeq ($(PRESET),cpu)
WIDTH ?= 128
FFN ?= 256
HEADS ?= 4
DROPOUT ?= 0.1
WARMUP ?= 400
LOG_EVERY ?= 20
DEVICE_ARGS := --cpu --num-workers 0
GENERATE_ARGS := --cpu
else
$(error PRESET=$(PRESET) is unknown; expected cpu or gpu)
endif
LAYERS ?= 18
LR ?= 0.001
CLIP_NORM ?= 1.0
