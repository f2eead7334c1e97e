# What a run trains on: the GPUs and machines there are, how an update's tokens are split over them, and in what
# precision. Gives MAX_TOKENS, UPDATE_FREQ, HELD, MACHINES, TRAIN and PRECISION_*.

# Either a recipe says MAX_TOKENS and UPDATE_FREQ; or it says TOKENS an update and the paper's batch A_DEVICE, and the
# rest follows from GPUS, NODES, the GPUs' MEMORY in GB, or MAX_TOKENS if the user gives one.
UPDATE_FREQ ?= 1
NODES ?= 1
ifdef TOKENS
BATCHES := $(ASK).batch $(TOKENS) --a-device $(A_DEVICE) --nodes $(NODES) $(GPUS:%=--devices %) \
	$(MAX_TOKENS:%=--max-tokens %) $(MEMORY:%=--memory %)
PLAN := $(shell $(BATCHES) 2>&1)
ifneq ($(.SHELLSTATUS),0)
$(error $(PLAN))
endif
override GPUS := $(call field,GPUS,$(PLAN))
override MAX_TOKENS := $(call field,MAX_TOKENS,$(PLAN))
override UPDATE_FREQ := $(call field,UPDATE_FREQ,$(PLAN))
HELD := --tokens-per-update $(TOKENS)
endif
GPUS ?= 1

# Every node runs the same command, with its number NODE (SLURM tells it) and the first one's address, MASTER.
NODE ?= $(or $(SLURM_NODEID),0)
ifneq ($(NODES),1)
ifeq ($(MASTER),)
$(error NODES=$(NODES) needs MASTER=HOST:PORT, where the first node is reached)
endif
# The others train along; what comes after is the first one's.
ifneq ($(and $(NODE:0=),$(filter-out train,$(or $(MAKECMDGOALS),all))),)
$(error NODE=$(NODE) of several only trains; run the target that ends in -train there)
endif
RENDEZVOUS := --distributed-init-method tcp://$(MASTER) --distributed-rank $(shell echo $$(( $(NODE) * $(GPUS) )))
endif
WORLD := $(if $(findstring --cpu,$(DEVICE_ARGS)),$(filter-out 1,$(NODES)),$(shell echo $$(( $(NODES) * $(GPUS) ))))
ON_CPUS := --distributed-no-spawn --distributed-backend gloo --ddp-backend legacy_ddp
MACHINES := $(WORLD:%=--distributed-world-size %) $(RENDEZVOUS) \
	$(if $(and $(RENDEZVOUS),$(findstring --cpu,$(DEVICE_ARGS))),$(ON_CPUS))

# fairseq-train takes --bf16 for the wish to train on a TPU; recipes/steps/train_bf16.py is fairseq-train without that.
PRECISION ?=
TRAIN := $(if $(filter bf16,$(PRECISION)),$(STEP).train_bf16,$(PYTHON) -m fairseq_cli.train)
PRECISION_fp16 := --fp16 --fp16-no-flatten-grads --fp16-scale-window 256 --threshold-loss-scale 0.03125
PRECISION_amp := --amp
PRECISION_bf16 := --bf16 --fp16-no-flatten-grads
ifneq ($(filter-out fp16 amp bf16 fp32,$(PRECISION)),)
$(error PRECISION=$(PRECISION) is unknown; expected fp16, amp, bf16 or fp32)
endif
