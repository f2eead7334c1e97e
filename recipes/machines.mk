# What a run trains on: the GPUs and machines there are, and how an update's tokens are split over them.
#
# Gives MAX_TOKENS, UPDATE_FREQ, HELD, LESS, MACHINES, and what precision.mk gives.

include recipes/precision.mk

# Either a recipe says MAX_TOKENS and UPDATE_FREQ; or it says TOKENS an update, the paper's batch A_DEVICE, and BY_MEMORY, the
# largest batch by GB of a GPU. The rest follows from GPUS, NODES, the GPUs' MEMORY in GB, or MAX_TOKENS if the user gives one.
UPDATE_FREQ ?= 1
NODES ?= 1
ifdef TOKENS
BATCHES := $(ASK).batch $(TOKENS) --a-device $(A_DEVICE) $(if $(BY_MEMORY),--by $(BY_MEMORY)) --nodes $(NODES) $(GPUS:%=--devices %) \
	$(MAX_TOKENS:%=--max-tokens %) $(MEMORY:%=--memory %) --precision $(or $(PRECISION),fp32) $(ON_CPU)
PLAN := $(shell $(BATCHES) 2>&1)
ifneq ($(.SHELLSTATUS),0)
$(error $(PLAN))
endif
override GPUS := $(call field,GPUS,$(PLAN))
override MAX_TOKENS := $(call field,MAX_TOKENS,$(PLAN))
override UPDATE_FREQ := $(call field,UPDATE_FREQ,$(PLAN))
# The batch to give where this one runs out of memory.
LESS := $(call field,LESS,$(PLAN))
HELD := --tokens-per-update $(TOKENS)
else
GPUS ?= 1
endif

# Every node runs the same command, with its number NODE (SLURM tells it) and the first one's address, MASTER.
NODE ?= $(if $(filter 1,$(NODES)),0,$(or $(SLURM_NODEID),0))
ifeq ($(filter $(NODE),$(shell seq 0 $$(( $(NODES) - 1 )))),)
$(error NODE=$(NODE) is none of NODES=$(NODES); expected a number from 0 to $(shell echo $$(( $(NODES) - 1 ))))
endif
ifneq ($(NODES),1)
# The host may be one of IPv6, [fd00::1].
PORT := $(call counts,$(lastword $(subst :, ,$(MASTER))))
ifeq ($(and $(PORT),$(word 2,$(subst :, ,$(MASTER)))),)
$(error NODES=$(NODES) needs MASTER=HOST:PORT, where the first node is reached; found MASTER=$(MASTER))
endif
# The others train along; what comes after is the first one's. (The make under a guard makes the text first.)
ifneq ($(and $(NODE:0=),$(if $(GUARDED),,here),$(filter-out train,$(or $(MAKECMDGOALS),all))),)
$(error NODE=$(NODE) of several only trains; run the target that ends in -train there)
endif
RENDEZVOUS := --distributed-init-method tcp://$(MASTER) --distributed-rank $(shell echo $$(( $(NODE) * $(GPUS) )))
else ifeq ($(ON_CPU),)
# fairseq would take a place to meet, and a number of processes, from the variables of a SLURM job or torchrun.
FREE_PORT := import socket; free = socket.socket(); free.bind(("127.0.0.1", 0)); print(free.getsockname()[1])
RENDEZVOUS := $(if $(GPUS:1=),--distributed-init-method "tcp://localhost:$$($(PYTHON) -c '$(FREE_PORT)')" --distributed-rank 0)
endif
WORLD := $(if $(ON_CPU),$(NODES),$(shell echo $$(( $(NODES) * $(GPUS) ))))
ON_CPUS := --distributed-no-spawn --distributed-backend gloo --ddp-backend legacy_ddp
MACHINES := --distributed-world-size $(WORLD) $(RENDEZVOUS) $(if $(and $(RENDEZVOUS),$(ON_CPU)),$(ON_CPUS))
