# The shared steps: raw text -> tokens -> joint BPE -> fairseq's binary data -> training -> average -> fold ->
# translations -> sacreBLEU -> summary. One file a target; interrupt anywhere, run again, it goes on.
#
# A recipe sets NAME, PAIR, COMMAND, PRESET and the sizes, includes this file, and says how $(RAW)/% is made: the raw
# text of both languages, of the splits train, valid and test or of the parts they are gathered from. Run from the
# repository's root.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all
.SECONDEXPANSION:

PYTHON ?= .venv/bin/python
METHOD ?= admin
SEED ?= 1
# Everything written goes under this folder.
RUNS ?= runs
# More options for fairseq-train, after the recipe's own.
TRAIN_ARGS ?=
# How long a run is: UPDATES, with a checkpoint every SAVE_EVERY of them; or EPOCHS, with one at the end of each, and
# every SAVE_EVERY updates one to go on from.
EPOCHS ?=
# How many of the last checkpoints to average.
AVERAGE ?= 5
BEAM ?= 5
LENPEN ?= 1
# Where a split is no text of its own: the texts it is gathered from, and which of their pairs, as in
# PARTS_valid := europarl commoncrawl and GATHER_valid := --every 23 --keep nth.
# Which training pairs are kept, by their words (CLEAN) or by their units after BPE (CLEAN_BPE, of the split valid, too).
CLEAN ?= --drop-empty
CLEAN_BPE ?=
# The numbers of pairs that train, valid and test must have, where they are known.
EXPECT ?=
# What tokenising does besides: lowercase, normalise, aggressive_dashes, escape, perl (fairseq_admin/text/tokens.py says what
# each is).
TOKENISER ?=

# What to train: Admin, stock Post-LN or Pre-LN, or another scheme of fairseq_admin/method/schemes.py.
SCHEMES := post-ln-pre-ln deepnorm rezero rezero-post-ln t-fixup fixup b2t looklinear ds-init
METHODS := admin post-ln pre-ln $(SCHEMES)
ARCH_admin := transformer_admin_18l
ARCH_post-ln := transformer
ARCH_pre-ln := transformer --encoder-normalize-before --decoder-normalize-before
$(foreach scheme,$(SCHEMES),$(eval ARCH_$(scheme) := transformer_admin_18l --admin-scheme $(scheme)))
ifeq ($(and $(filter 1,$(words $(METHOD))),$(ARCH_$(METHOD))),)
$(error METHOD=$(METHOD) is unknown; expected one of $(METHODS))
endif
ifeq ($(wildcard recipes/pipeline.mk),)
$(error recipes/pipeline.mk is not here ($(CURDIR)); run make from the repository's root)
endif

SOURCE := $(word 1,$(subst -, ,$(PAIR)))
TARGET := $(word 2,$(subst -, ,$(PAIR)))
TEXT := $(RUNS)/$(NAME)/data
RAW ?= $(TEXT)/raw
ARCHIVES := $(RUNS)/archives
RUN := $(RUNS)/$(NAME)$(SIZE:%=/%)/$(METHOD)-$(PRESET)-s$(SEED)
# What the run is called in results.csv.
JOB ?= $(NAME)

export PYTHONUNBUFFERED := 1
# Of fairseq's and its libraries' use of one another: nothing the user can mend.
export PYTHONWARNINGS ?= ignore
STEP := $(PYTHON) -m recipes.steps

include recipes/machines.mk

# -- settings --------------------------------------------------------------------------------------------------------

# A multiple of 1: with fairseq's own, 8, the last sentences (up to 7) fall in no batch, and are not translated either.
BATCH := --max-tokens $(MAX_TOKENS) --required-batch-size-multiple 1
# What a run's checkpoints depend on. UPDATES and EPOCHS are left out: more of them continue the run.
ENCODER_LAYERS ?= $(LAYERS)
DECODER_LAYERS ?= $(LAYERS)
MODEL := --encoder-layers $(ENCODER_LAYERS) --decoder-layers $(DECODER_LAYERS) \
	--encoder-embed-dim $(WIDTH) --decoder-embed-dim $(WIDTH) \
	--encoder-ffn-embed-dim $(FFN) --decoder-ffn-embed-dim $(FFN) \
	--encoder-attention-heads $(HEADS) --decoder-attention-heads $(HEADS) \
	--dropout $(DROPOUT) $(ATTENTION_DROPOUT:%=--attention-dropout %) $(ACTIVATION_DROPOUT:%=--activation-dropout %) \
	--share-all-embeddings
OPTIMISATION := --optimizer radam --adam-betas "(0.9, 0.98)" --weight-decay $(WEIGHT_DECAY) --clip-norm $(CLIP_NORM) \
	--lr $(LR) --lr-scheduler inverse_sqrt --warmup-updates $(WARMUP) --warmup-init-lr 1e-7 \
	--criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
	--seed $(SEED)
BATCH_SIZE := $(BATCH) --update-freq $(UPDATE_FREQ)
# With the tokens of an update held, a run may go on with other batches, on other machines.
SETTINGS := $(MODEL) $(OPTIMISATION) $(or $(HELD),$(BATCH_SIZE)) $(DEVICE_ARGS) $(PRECISION_$(PRECISION)) $(TRAIN_ARGS)

.PHONY: all prepare train average generate score FORCE
# Both sides of texts in a folder. make keeps them, though it could make them again.
both = $(foreach text,$(2),$(1)/$(text).$(SOURCE) $(1)/$(text).$(TARGET))
SPLITS := train valid test
SEVERAL := $(sort $(foreach split,$(SPLITS),$(PARTS_$(split))))
.SECONDARY: $(call both,$(RAW),$(SPLITS) $(SEVERAL)) $(call both,$(TEXT)/tok,$(SPLITS) $(SEVERAL)) \
	$(call both,$(TEXT)/split,$(SPLITS))
all: $(RUN)/summary.txt
	@cat $<
prepare: $(TEXT)/bin/dict.$(TARGET).txt $(call both,$(RAW),test)
train: $(RUN)/trained-$(or $(EPOCHS:%=%-epochs),$(UPDATES))
average: $(RUN)/model/model.pt
generate: $(RUN)/generate.txt
score: $(RUN)/score.json

# -- archives --------------------------------------------------------------------------------------------------------

EXTRACT = $(STEP).extract $(EXTRACT_ARGS)
# Where an archive is: among those downloaded, or the folder DATA, if that holds not the archive but what is in it. What
# was extracted once needs it no more; whoever is short of room may delete it.
archive = $(if $(DATA),$(if $(wildcard $(DATA)/$(1)),$(ARCHIVES)/$(1),$(DATA)),$(ARCHIVES)/$(1))
.SECONDARY: $(USED:%=$(ARCHIVES)/%)
$(ARCHIVES)/%:
	# download $*
	$(STEP).download $* --out $@ $(DATA:%=--data %) $(URL:%=--url %) $(TABLE:%=--table %)

# -- text ------------------------------------------------------------------------------------------------------------

$(TEXT)/settings.json: FORCE
	@$(STEP).settings $@ pair=$(PAIR) merges=$(MERGES) $(TEXT_SETTINGS) \
		$(if $(strip $(TOKENISER)),'tokeniser=$(sort $(TOKENISER))') \
		$(if $(SEVERAL),'cleaning=$(strip $(CLEAN) $(CLEAN_BPE) $(GATHER_train))')

# Of this file nothing is made anew: it changes with the settings only, and those are held.
$(TEXT)/text.json: | $(TEXT)/settings.json
	# how text is tokenised
	$(STEP).text $(SOURCE) $(TARGET) $(TOKENISER) -o $@

$(call both,$(TEXT)/tok,$(or $(PARTS_train),train)): TOKENISE := $(CLEAN)
$(TEXT)/tok/%.$(SOURCE) $(TEXT)/tok/%.$(TARGET): $(RAW)/%.$(SOURCE) $(RAW)/%.$(TARGET) | $(TEXT)/text.json
	# tokens of $*
	$(STEP).tokenise $(TEXT)/text.json $(RAW)/$* $(TEXT)/tok/$* $(TOKENISE)

# A split that is gathered from parts, in their order: all pairs, or every nth one, or the rest.
$(TEXT)/split/%.$(SOURCE) $(TEXT)/split/%.$(TARGET): $$(call both,$(TEXT)/tok,$$(PARTS_$$*))
	# the split $*
	$(STEP).split $(addprefix $(TEXT)/tok/,$(PARTS_$*)) --languages $(SOURCE) $(TARGET) -o $(TEXT)/split/$* $(GATHER_$*)

# What byte-pair encoding is learnt from and applied to.
WORDS := $(TEXT)/$(if $(SEVERAL),split,tok)

$(TEXT)/codes: $(call both,$(WORDS),train)
	# learn $(MERGES) joint merges
	$(STEP).bpe learn $(MERGES) $^ -o $@

$(call both,$(TEXT)/bpe,train valid): SPLIT_UP := $(CLEAN_BPE)
$(TEXT)/bpe/%.$(SOURCE) $(TEXT)/bpe/%.$(TARGET): $(WORDS)/%.$(SOURCE) $(WORDS)/%.$(TARGET) $(TEXT)/codes
	# units of the split $*
	$(STEP).bpe apply $(TEXT)/codes $(WORDS)/$*.$(SOURCE) $(WORDS)/$*.$(TARGET) -o $(@D) $(SPLIT_UP)

$(TEXT)/bin/dict.$(TARGET).txt: $(call both,$(TEXT)/bpe,$(SPLITS))
	# fairseq's binary data
	$(if $(EXPECT),$(STEP).counts $(WORDS) $(SOURCE) $(TARGET) $(join $(SPLITS:%=%=),$(EXPECT)))
	rm -rf $(@D) $(@D).part
	$(PYTHON) -m fairseq_cli.preprocess --source-lang $(SOURCE) --target-lang $(TARGET) --joined-dictionary \
		--trainpref $(TEXT)/bpe/train --validpref $(TEXT)/bpe/valid --testpref $(TEXT)/bpe/test \
		--destdir $(@D).part --workers $$(getconf _NPROCESSORS_ONLN)
	mv $(@D).part $(@D)

# -- model -----------------------------------------------------------------------------------------------------------

$(RUN)/settings.json: FORCE
	@$(STEP).settings $@ 'train=$(subst ','\'',$(strip $(SETTINGS)))'

# How long it trains, which checkpoints it keeps, and how those to average are named. The validation that comes with a
# checkpoint every so many updates is the only one there, hence the endless intervals in epochs.
ifneq ($(EPOCHS),)
LENGTH := --max-epoch $(EPOCHS) --save-interval-updates $(SAVE_EVERY) --keep-interval-updates 1 --keep-last-epochs $(AVERAGE)
TO_AVERAGE := $(RUN)/checkpoints --by epochs --last $(AVERAGE)
else
LENGTH := --max-update $(UPDATES) --save-interval-updates $(SAVE_EVERY) --keep-interval-updates $(AVERAGE) \
	--save-interval 1000000 --validate-interval 1000000
TO_AVERAGE := $(RUN)/checkpoints/checkpoint_*_*.pt
endif

# A run goes on from the newest of its numbered checkpoints, which fairseq writes beside and renames, and not from
# checkpoint_last.pt or checkpoint_best.pt, which it copies in place: a kill may cut those short.
$(RUN)/trained-$(or $(EPOCHS:%=%-epochs),$(UPDATES)): $(TEXT)/bin/dict.$(TARGET).txt | $(RUN)/settings.json
	# train: $(or $(EPOCHS:%=% epochs),$(UPDATES) updates), each of $(NODES) x $(GPUS) x $(UPDATE_FREQ) batches of up to $(MAX_TOKENS) tokens
	$(if $(CHECK_GPUS),@$(BATCHES) --check > /dev/null)
	mkdir -p $(RUN)/checkpoints
	newest=$$(ls -t $(RUN)/checkpoints/checkpoint[0-9]*.pt $(RUN)/checkpoints/checkpoint_[0-9]*_*.pt 2>/dev/null | head -n 1 || true); \
	$(TRAIN) $(TEXT)/bin --user-dir fairseq_admin --source-lang $(SOURCE) --target-lang $(TARGET) \
		--arch $(ARCH_$(METHOD)) $(MODEL) $(OPTIMISATION) $(BATCH_SIZE) $(DEVICE_ARGS) $(PRECISION_$(PRECISION)) $(MACHINES) \
		$(LENGTH) --save-dir $(RUN)/checkpoints $${newest:+--restore-file "$$newest"} --no-last-checkpoints \
		--tensorboard-logdir $(RUN)/tensorboard $(WANDB:%=--wandb-project %) \
		--log-format json --log-interval $(LOG_EVERY) $(TRAIN_ARGS) 2>&1 \
		| tee -a $(RUN)/train$(patsubst %,-node%,$(filter-out 0,$(NODE))).log \
		| $(STEP).progress $(if $(EPOCHS),--epochs $(EPOCHS),--updates $(UPDATES))
	touch $@

$(RUN)/average.pt: $(RUN)/trained-$(or $(EPOCHS:%=%-epochs),$(UPDATES))
	# average the last $(AVERAGE) checkpoints
	$(PYTHON) -m fairseq_admin.cli average $(TO_AVERAGE) -o $@

$(RUN)/omega.json: $(RUN)/average.pt
	$(PYTHON) -m fairseq_admin.cli omega $< --json > $@.part
	mv $@.part $@

# All that translating takes, in one folder. A model of ours is folded there if it can be, which
# compares the two on the validation set.
ASSETS := $(TEXT)/bin/dict.$(SOURCE).txt $(TEXT)/bin/dict.$(TARGET).txt $(TEXT)/codes $(TEXT)/text.json
FOLDED := $(filter admin post-ln-pre-ln deepnorm rezero-post-ln looklinear ds-init,$(METHOD))
$(RUN)/model/model.pt: $(RUN)/average.pt
	# all that translating takes, in one folder
	mkdir -p $(@D)
	cp $(ASSETS) $(@D)
	$(if $(FOLDED),$(PYTHON) -m fairseq_admin.cli fold $< -o $@ --data $(TEXT)/bin,cp $< $@.part && mv $@.part $@)

# -- result ----------------------------------------------------------------------------------------------------------

# A folded model needs no plugin. Another does, a stock one for torch's safe loader to read the rest of the checkpoint.
USER_DIR := $(if $(FOLDED),,--user-dir fairseq_admin)
$(RUN)/generate.txt: $(RUN)/model/model.pt
	# translate the test set
	$(PYTHON) -m fairseq_cli.generate $(TEXT)/bin $(USER_DIR) --path $< --gen-subset test \
		--source-lang $(SOURCE) --target-lang $(TARGET) --beam $(BEAM) --lenpen $(LENPEN) \
		$(BATCH) $(GENERATE_ARGS) 2>&1 | tee $@.part | $(STEP).progress
	mv $@.part $@

$(RUN)/score.json: $(RUN)/generate.txt $(call both,$(RAW),test) | $(TEXT)/text.json
	# score
	$(STEP).score $(RUN) --raw $(RAW)/test --tokenised $(WORDS)/test.$(TARGET) --text $(TEXT)/text.json $(COMPOUNDS) \
		--results $(RUNS)/results.csv --recipe $(JOB) --method $(METHOD) --preset $(PRESET) --seed $(SEED) \
		--tokens $(or $(TOKENS),$$(( $(MAX_TOKENS) * $(UPDATE_FREQ) * $(or $(WORLD),1) )))

# The other methods' results, once they are there, are part of the summary.
OTHERS := $(wildcard $(foreach method,$(METHODS),$(dir $(RUN))$(method)-$(PRESET)-s$(SEED)/score.json))
$(RUN)/summary.txt: $(RUN)/score.json $(if $(filter admin,$(METHOD)),$(RUN)/omega.json) $(OTHERS)
	$(STEP).summary $(RUN) --raw $(RAW)/test --pair $(PAIR) --command "$(COMMAND)"
