# A grid of training runs on one small corpus: corpus -> fairseq-preprocess -> fairseq-train -> fairseq-generate ->
# result. One file a target; interrupt anywhere, run again, it goes on, and a finished cell is not run again.
#
# A recipe includes common.mk, sets NAME, SCHEMES, TRIAL (variables of a grid to make first, whose TRIED tells the best rates; or
# nothing), SUMMARY (the files at the end), CELLS, and for each cell AXES_<cell> (where it is in the grid, NAME=VALUE) and OPTIONS_<cell>
# (fairseq-train's); it includes this file and says how SUMMARY is made of $(RESULTS).

# A page that was written before the runs; each row then names the commit of it.
PROTOCOL ?=
# Runs side by side, one CPU thread each; on a machine with GPUs each on one of them, in turn.
JOBS ?= 1

PRESET ?= cpu
ifeq ($(PRESET),cpu)
# The generated corpus: pairs to train on, and words a language.
PAIRS ?= 20000
WORDS ?= 100
WIDTH ?= 128
FFN ?= 256
MAX_TOKENS ?= 192
SAVE_EVERY ?= 100
LOG_EVERY ?= 10
OUT := $(RUNS)/$(NAME)
PAIR := a-b
BIN := $(OUT)/bin
DEVICE_ARGS := --cpu --num-workers 0
GENERATE_ARGS := --cpu --num-workers 0
else ifeq ($(PRESET),gpu)
# The demo's corpus, with the demo's BPE.
WIDTH ?= 256
FFN ?= 1024
MAX_TOKENS ?= 4096
SAVE_EVERY ?= 500
LOG_EVERY ?= 20
OUT := $(RUNS)/$(NAME)-gpu
PAIR := de-en
BIN := $(RUNS)/demo/data/bin
DEVICE_ARGS := --num-workers 2 --required-seq-len-multiple 8
PRECISION ?= fp16
GENERATE_ARGS := --remove-bpe
else ifeq ($(PRESET),multi30k)
# Real text: German to English, made as `make multi30k PRESET=cpu` makes it, and that recipe's sizes.
WIDTH ?= 128
FFN ?= 256
MAX_TOKENS ?= 1024
DROPOUT ?= 0.1
CLIP_NORM ?= 1.0
SAVE_EVERY ?= 250
LOG_EVERY ?= 20
OUT := $(RUNS)/$(NAME)-multi30k
PAIR := de-en
MADE := $(RUNS)/multi30k/$(PAIR)/data
BIN := $(MADE)/bin
DEVICE_ARGS := --cpu --num-workers 0
GENERATE_ARGS := --cpu --remove-bpe
# sacreBLEU of the text as it was published, not of tokens.
SCORED := --raw $(RUNS)/multi30k/raw/test --text $(MADE)/text.json
else
$(error PRESET=$(PRESET) is unknown; expected cpu, gpu or multi30k)
endif
HEADS ?= 4
DROPOUT ?= 0.0
CLIP_NORM ?= 0.0
BEAM ?= 5
EMBEDDINGS ?= --share-all-embeddings
# A run that does not improve on its best validation in a leg of so many updates ends there.
LEG ?= $(UPDATES)

$(call some-of,SCHEMES,$(METHODS))
$(call a-multiple,WIDTH,HEADS)
include recipes/precision.mk

# $(call weights,SCHEME): some schemes draw feed-forward weights of their own, from Xavier's law, whatever FFN_INIT is.
weights = $(if $(filter $(1),$(call field,FFN,$(TABLE_OF_SCHEMES))),--admin-ffn-init $(FFN_INIT))

export OMP_NUM_THREADS ?= 1
# fairseq's own models are built through the plugin too, which equals them bit for bit and says when a run diverges.
SETTINGS = --arch transformer_admin --encoder-embed-dim $(WIDTH) --encoder-ffn-embed-dim $(FFN) \
	--encoder-attention-heads $(HEADS) --decoder-attention-heads $(HEADS) $(EMBEDDINGS) --dropout $(DROPOUT) \
	--optimizer $(OPTIMIZER) --clip-norm $(CLIP_NORM) --criterion label_smoothed_cross_entropy_fast --label-smoothing 0.1 \
	--max-tokens $(MAX_TOKENS) --required-batch-size-multiple 1 --log-interval $(LOG_EVERY) \
	$(SCHEDULE) $(DEVICE_ARGS) $(PRECISION_$(PRECISION)) $(TRAIN_ARGS)
# How far the grid is, and since when, for what a cell says of itself.
HOW_FAR = --cells $(CELLS) $(if $(SINCE),--since $(SINCE))
RESULTS := $(foreach cell,$(CELLS),$(OUT)/$(cell)/result.json)

.SECONDARY:
# Whoever begins the same grid at the same time waits for its text, and for every cell that the other one is at.
all:
	$(if $(PLANNING),,+@$(call GUARD,--alone $(OUT)/text --wait) $(OUT)/entropy.json)
ifneq ($(TRIAL),)
	+@$(MAKE) --no-print-directory -f $(firstword $(MAKEFILE_LIST)) $(TRIAL)
	@$(PYTHON) -m recipes.compare.best $(OUT)/best.txt $(TRIED)
	+@$(GUARD) -j $(JOBS) SINCE=$$(date +%s) $(if $(PLANNING),,BEST="$$(cat $(OUT)/best.txt)") $(SUMMARY)
else
	+@$(GUARD) -j $(JOBS) SINCE=$$(date +%s) $(SUMMARY)
endif
	@cat $(firstword $(SUMMARY))
	@echo; echo "Files: $(SUMMARY)"

# Translating is among what is held: a cell's checkpoints are gone once it has its result.
$(OUT)/settings.json: $(if $(filter cpu,$(PRESET)),,$(BIN)/dict.en.txt) FORCE
	@$(STEP).settings $@ --models $(OUT) updates=$(UPDATES) leg=$(LEG) beam=$(BEAM) ffn_init=$(FFN_INIT) \
		$(if $(filter cpu,$(PRESET)),pairs=$(PAIRS)/$(VALID_PAIRS)/$(TEST_PAIRS) words=$(WORDS),--with $(BIN)/../settings.json) -- $(SETTINGS)

# A recipe whose text this is. It gets those variables alone that follow. What the user gave for the grid would reach it
# through MAKEFLAGS and the environment.
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
OF_ITS_OWN := env $(patsubst %,-u %,$(sort $(GIVEN) $(COUNTS) $(AXES))) MAKEFLAGS=$(if $(PLANNING),n) $(PYTHON) -m recipes
ifeq ($(PRESET),cpu)
VALID_PAIRS ?= 1000
TEST_PAIRS ?= 1000
$(OUT)/text/train.a: SIZE = $(PAIRS)
$(OUT)/text/valid.a: SIZE = $(VALID_PAIRS)
$(OUT)/text/test.a: SIZE = $(TEST_PAIRS)
$(OUT)/text/%.a $(OUT)/text/%.b: $(OUT)/settings.json
	$(PYTHON) -m recipes.compare.reversed_corpus $* $(OUT)/text/$* --pairs $(SIZE) --words $(WORDS)

$(BIN)/dict.b.txt: $(foreach split,train valid test,$(OUT)/text/$(split).a $(OUT)/text/$(split).b)
	$(call binarise,--source-lang a --target-lang b --joined-dictionary --trainpref $(OUT)/text/train \
		--validpref $(OUT)/text/valid --testpref $(OUT)/text/test,\
		>$(OUT)/preprocess.log 2>&1 || { cat $(OUT)/preprocess.log; exit 1; })
else ifeq ($(PRESET),gpu)
$(BIN)/dict.en.txt:
	+$(OF_ITS_OWN) demo-prepare PRESET=cpu RUNS=$(RUNS)
else
$(BIN)/dict.en.txt:
	+$(OF_ITS_OWN) multi30k-prepare PRESET=cpu RUNS=$(RUNS) \
		$(foreach name,DATA URL SUMS MERGES,$(if $($(name)),$(name)=$(call quoted,$($(name)))))
endif

$(OUT)/entropy.json: $(BIN)/dict.$(lastword $(subst -, ,$(PAIR))).txt
	@$(PYTHON) -m recipes.compare.entropy $(BIN) --pair $(PAIR) -o $@

# One rule for both steps: with one each, make would translate nothing before it has trained everything.
$(OUT)/%/result.json: $(OUT)/entropy.json | $(OUT)/settings.json
	@$(PYTHON) -m recipes.compare.train_cell $(@D) --data $(BIN) --updates $(UPDATES) --leg $(LEG) --save-every $(SAVE_EVERY) \
		--jobs $(JOBS) $(HOW_FAR) -- $(SETTINGS) $(OPTIONS_$*)
	@$(PYTHON) -m recipes.compare.result $(@D) $(AXES_$*) --data $(BIN) --entropy $(OUT)/entropy.json \
		$(SCORED) $(if $(PROTOCOL),--protocol $(PROTOCOL)) --jobs $(JOBS) $(HOW_FAR) -- --beam $(BEAM) --max-len-a 1.2 --max-len-b 10 --max-tokens 2000 $(GENERATE_ARGS)
