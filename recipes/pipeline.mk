# The shared steps: raw text -> tokens -> joint BPE -> fairseq's binary data -> training -> average -> fold ->
# translations -> sacreBLEU -> summary. One file a target; interrupt anywhere, run again, it goes on.
#
# A recipe sets NAME, PAIR, COMMAND, PRESET and the sizes, includes this file, and says how $(RAW)/% is made: the six
# files train, valid and test of both languages. Run from the repository's root.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := all

PYTHON ?= .venv/bin/python
METHOD ?= admin
SEED ?= 1
# Everything written goes under this folder.
RUNS ?= runs
# More options for fairseq-train, after the recipe's own.
TRAIN_ARGS ?=
# How many of the last checkpoints to average, one every SAVE_EVERY updates.
AVERAGE ?= 5
BEAM ?= 5
UPDATE_FREQ ?= 1
# What tokenising does besides: lowercase, normalise, aggressive_dashes, escape (fairseq_admin/text.py says what each is).
TOKENISER ?=

# What to train: Admin, stock Post-LN or Pre-LN, or another scheme of fairseq_admin/schemes.py.
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
RUN := $(RUNS)/$(NAME)/$(METHOD)-$(PRESET)-s$(SEED)

export PYTHONUNBUFFERED := 1
# Of fairseq's and its libraries' use of one another: nothing the user can mend.
export PYTHONWARNINGS ?= ignore
STEP := $(PYTHON) -m recipes.steps

# A multiple of 1: with fairseq's own, 8, the last sentences (up to 7) fall in no batch, and are not translated either.
BATCH := --max-tokens $(MAX_TOKENS) --required-batch-size-multiple 1
# What a run's checkpoints depend on. UPDATES is left out: more of them continue the run.
MODEL := --encoder-layers $(LAYERS) --decoder-layers $(LAYERS) \
	--encoder-embed-dim $(WIDTH) --decoder-embed-dim $(WIDTH) \
	--encoder-ffn-embed-dim $(FFN) --decoder-ffn-embed-dim $(FFN) \
	--encoder-attention-heads $(HEADS) --decoder-attention-heads $(HEADS) \
	--dropout $(DROPOUT) --share-all-embeddings
OPTIMISATION := --optimizer radam --adam-betas "(0.9, 0.98)" --weight-decay $(WEIGHT_DECAY) --clip-norm $(CLIP_NORM) \
	--lr $(LR) --lr-scheduler inverse_sqrt --warmup-updates $(WARMUP) --warmup-init-lr 1e-7 \
	--criterion label_smoothed_cross_entropy --label-smoothing 0.1 \
	$(BATCH) --update-freq $(UPDATE_FREQ) --seed $(SEED)
SETTINGS := $(MODEL) $(OPTIMISATION) $(DEVICE_ARGS) $(TRAIN_ARGS)

.PHONY: all FORCE
# Both sides of every split in a folder. make keeps them, though it could make them again.
files = $(foreach split,train valid test,$(1)/$(split).$(SOURCE) $(1)/$(split).$(TARGET))
.SECONDARY: $(call files,$(RAW)) $(call files,$(TEXT)/tok)
all: $(RUN)/summary.txt
	@cat $<

# -- text ------------------------------------------------------------------------------------------------------------

$(TEXT)/settings.json: FORCE
	@$(STEP).settings $@ pair=$(PAIR) merges=$(MERGES) $(TEXT_SETTINGS) \
		$(if $(strip $(TOKENISER)),'tokeniser=$(sort $(TOKENISER))')

# Of this file nothing is made anew: it changes with the settings only, and those are held.
$(TEXT)/text.json: | $(TEXT)/settings.json
	$(STEP).text $(SOURCE) $(TARGET) $(TOKENISER) -o $@

$(TEXT)/tok/train.$(SOURCE) $(TEXT)/tok/train.$(TARGET): DROP := --drop-empty
$(TEXT)/tok/%.$(SOURCE) $(TEXT)/tok/%.$(TARGET): $(RAW)/%.$(SOURCE) $(RAW)/%.$(TARGET) | $(TEXT)/text.json
	$(STEP).tokenise $(TEXT)/text.json $(RAW)/$* $(TEXT)/tok/$* $(DROP)

$(TEXT)/codes: $(TEXT)/tok/train.$(SOURCE) $(TEXT)/tok/train.$(TARGET)
	$(STEP).bpe learn $(MERGES) $^ -o $@

$(TEXT)/bpe/%.$(SOURCE) $(TEXT)/bpe/%.$(TARGET): $(TEXT)/tok/%.$(SOURCE) $(TEXT)/tok/%.$(TARGET) $(TEXT)/codes
	$(STEP).bpe apply $(TEXT)/codes $(TEXT)/tok/$*.$(SOURCE) $(TEXT)/tok/$*.$(TARGET) -o $(@D)

$(TEXT)/bin/dict.$(TARGET).txt: $(call files,$(TEXT)/bpe)
	rm -rf $(@D) $(@D).part
	$(PYTHON) -m fairseq_cli.preprocess --source-lang $(SOURCE) --target-lang $(TARGET) --joined-dictionary \
		--trainpref $(TEXT)/bpe/train --validpref $(TEXT)/bpe/valid --testpref $(TEXT)/bpe/test \
		--destdir $(@D).part
	mv $(@D).part $(@D)

# -- model -----------------------------------------------------------------------------------------------------------

$(RUN)/settings.json: FORCE
	@$(STEP).settings $@ 'train=$(subst ','\'',$(strip $(SETTINGS)))'

# A run goes on from the newest checkpoint_EPOCH_UPDATE.pt, which fairseq writes beside and renames, and not from
# checkpoint_last.pt, which it copies in place: a kill may cut that one short. The validation that comes with each
# checkpoint is the only one, hence the endless intervals in epochs.
$(RUN)/trained-$(UPDATES): $(TEXT)/bin/dict.$(TARGET).txt | $(RUN)/settings.json
	mkdir -p $(RUN)/checkpoints
	newest=$$(ls -t $(RUN)/checkpoints/checkpoint_*_*.pt 2>/dev/null | head -n 1 || true); \
	$(PYTHON) -m fairseq_cli.train $(TEXT)/bin --user-dir fairseq_admin --source-lang $(SOURCE) --target-lang $(TARGET) \
		--arch $(ARCH_$(METHOD)) $(SETTINGS) --max-update $(UPDATES) \
		--save-dir $(RUN)/checkpoints $${newest:+--restore-file "$$newest"} --no-last-checkpoints \
		--save-interval-updates $(SAVE_EVERY) --keep-interval-updates $(AVERAGE) \
		--save-interval 1000000 --validate-interval 1000000 \
		--log-format json --log-interval $(LOG_EVERY) 2>&1 \
		| tee -a $(RUN)/train.log | $(STEP).progress --updates $(UPDATES)
	touch $@

$(RUN)/average.pt: $(RUN)/trained-$(UPDATES)
	$(PYTHON) -m fairseq_admin.cli average $(RUN)/checkpoints/checkpoint_*_*.pt -o $@

$(RUN)/omega.json: $(RUN)/average.pt
	$(PYTHON) -m fairseq_admin.cli omega $< --json > $@.part
	mv $@.part $@

# All that translating takes, in one folder. A model of ours is folded there if it can be, which
# compares the two on the validation set.
ASSETS := $(TEXT)/bin/dict.$(SOURCE).txt $(TEXT)/bin/dict.$(TARGET).txt $(TEXT)/codes $(TEXT)/text.json
FOLDED := $(filter admin post-ln-pre-ln deepnorm rezero-post-ln looklinear ds-init,$(METHOD))
$(RUN)/model/model.pt: $(RUN)/average.pt
	mkdir -p $(@D)
	cp $(ASSETS) $(@D)
	$(if $(FOLDED),$(PYTHON) -m fairseq_admin.cli fold $< -o $@ --data $(TEXT)/bin,cp $< $@.part && mv $@.part $@)

# -- result ----------------------------------------------------------------------------------------------------------

# A folded model needs no plugin. Another does, a stock one for torch's safe loader to read the rest of the checkpoint.
USER_DIR := $(if $(FOLDED),,--user-dir fairseq_admin)
$(RUN)/generate.txt: $(RUN)/model/model.pt
	$(PYTHON) -m fairseq_cli.generate $(TEXT)/bin $(USER_DIR) --path $< --gen-subset test \
		--source-lang $(SOURCE) --target-lang $(TARGET) --beam $(BEAM) $(BATCH) $(GENERATE_ARGS) 2>&1 | tee $@.part | $(STEP).progress
	mv $@.part $@

$(RUN)/score.json: $(RUN)/generate.txt $(RAW)/test.$(SOURCE) $(RAW)/test.$(TARGET) | $(TEXT)/text.json
	$(STEP).score $(RUN) --raw $(RAW)/test --text $(TEXT)/text.json --results $(RUNS)/results.csv --recipe $(NAME) \
		--method $(METHOD) --preset $(PRESET) --seed $(SEED) --tokens $$(( $(MAX_TOKENS) * $(UPDATE_FREQ) ))

# The other methods' results, once they are there, are part of the summary.
OTHERS := $(wildcard $(foreach method,$(METHODS),$(RUNS)/$(NAME)/$(method)-$(PRESET)-s$(SEED)/score.json))
$(RUN)/summary.txt: $(RUN)/score.json $(if $(filter admin,$(METHOD)),$(RUN)/omega.json) $(OTHERS)
	$(STEP).summary $(RUN) --raw $(RAW)/test --pair $(PAIR) --command "$(COMMAND)"
