# fairseq's binary data -> checkpoints -> their average -> the model, folded if its scheme can be.
#
# Reads $(BINARY) and $(BINARISED); TASK, ARCH, MODEL, BATCH and VALIDATED, fairseq's options for them; METHOD, SEED, PRESET, UPDATES or
# EPOCHS, and the other variables below; what machines.mk reads; FINAL, where the model is to be, and ASSETS, what it takes
# to use it.
# Gives $(RUN)/settings.json, checkpoints, average.pt, omega.json and fold.txt; $(FINAL), with $(ASSETS) next to it;
# USER_DIR, what the model needs of the plugin; and the targets train and average.

# What to train: a scheme of the table, each through the plugin, which computes what fairseq computes where that has the
# scheme too, and stops a run whose updates are all skipped.
METHOD ?= admin
$(call one-of,METHOD,$(METHODS))
SEED ?= 1
# How long a run is: UPDATES, with a checkpoint every SAVE_EVERY of them; or EPOCHS, with one at the end of each, and
# every SAVE_EVERY updates one to go on from.
EPOCHS ?=
# How many of the last checkpoints to average.
AVERAGE ?= 5
WEIGHT_DECAY ?= 0.0
LABEL_SMOOTHING ?= 0.1
WEIGHTS := --admin-ffn-init $(FFN_INIT)
$(if $(and $(EPOCHS),$(filter command environment,$(origin UPDATES))),$(error UPDATES=$(UPDATES) is given, and EPOCHS=$(EPOCHS) says how long it trains; give another EPOCHS=, or EPOCHS= empty))
PLANNED := $(shell $(ASK).length $(if $(EPOCHS),epochs="$(EPOCHS)",updates="$(UPDATES)") save_every="$(SAVE_EVERY)" average="$(AVERAGE)" 2>&1)
ifneq ($(.SHELLSTATUS),0)
$(error $(PLANNED))
endif

include recipes/machines.mk

# -- settings --------------------------------------------------------------------------------------------------------

# Every epoch has batches of its own. fairseq would keep those of the epoch that a process began with, so a run that was
# resumed would see others than one that was not.
OWN_BATCHES := --update-epoch-batch-itr True
OPTIMISATION := --optimizer radam --adam-betas "(0.9, 0.98)" --weight-decay $(WEIGHT_DECAY) --clip-norm $(CLIP_NORM) \
	--lr $(LR) --lr-scheduler inverse_sqrt --warmup-updates $(WARMUP) --warmup-init-lr 1e-7 \
	--criterion label_smoothed_cross_entropy_fast --label-smoothing $(LABEL_SMOOTHING) \
	--seed $(SEED) $(OWN_BATCHES)
BATCH_SIZE := $(BATCH) --update-freq $(UPDATE_FREQ)
PRECISE := $(DEVICE_ARGS) $(PRECISION_$(PRECISION))
# What a run's checkpoints depend on. UPDATES and EPOCHS are left out: more of them continue the run. With the tokens of an
# update held, a run may go on with other batches, on other machines.
SETTINGS := $(MODEL) $(WEIGHTS) $(OPTIMISATION) $(or $(HELD),$(BATCH_SIZE)) $(PRECISE) $(TRAIN_ARGS)

# With the settings of its text, and the files that was read from.
$(RUN)/settings.json: $(BINARISED) FORCE
	@$(STEP).settings $@ --models $(RUN) --with $(TEXT)/settings.json $(wildcard $(RAW)/inputs.json) \
		--length $(if $(EPOCHS),epochs=$(EPOCHS),updates=$(UPDATES)) save_every=$(SAVE_EVERY) -- $(SETTINGS)

# What is made of the checkpoints depends on settings of its own, and is made again where they change.
SETTINGS_average = average=$(AVERAGE) of=$(if $(EPOCHS),epochs,updates)
$(RUN)/settings.%.json: FORCE
	@$(STEP).settings $@ --redo $(SETTINGS_$*)

# -- training --------------------------------------------------------------------------------------------------------

TRAINED := $(RUN)/trained-$(or $(EPOCHS:%=%-epochs),$(UPDATES))
$(eval $(call goal,train,$(TRAINED)))
$(eval $(call goal,average,$(FINAL)))

# How long it trains, which checkpoints it keeps, and how those to average are named. The validation that comes with a
# checkpoint every so many updates is the only one there, hence the endless intervals in epochs.
ifneq ($(EPOCHS),)
LENGTH := --max-epoch $(EPOCHS) --save-interval-updates $(SAVE_EVERY) --keep-interval-updates 1 --keep-last-epochs $(AVERAGE)
else
LENGTH := --max-update $(UPDATES) --save-interval-updates $(SAVE_EVERY) --keep-interval-updates $(AVERAGE) \
	--validate-interval-updates $(SAVE_EVERY) --save-interval 1000000 --validate-interval 1000000
endif
KIND := $(if $(EPOCHS),epochs,updates)

$(TRAINED): $(BINARISED) | $(RUN)/settings.json
	# train: $(or $(EPOCHS:%=% epochs),$(UPDATES) updates), each of $(NODES) x $(GPUS) x $(UPDATE_FREQ) batches of up to $(MAX_TOKENS) tokens
	$(if $(CHECK_GPUS),@$(BATCHES) --check > /dev/null)
	mkdir -p $(RUN)/checkpoints
	$(STEP).train $(BINARY) --user-dir fairseq_admin $(TASK) --arch $(ARCH) --admin-scheme $(METHOD) \
		$(WEIGHTS) $(MODEL) $(OPTIMISATION) $(BATCH_SIZE) $(PRECISE) $(MACHINES) \
		$(LENGTH) $(VALIDATED) --save-dir $(RUN)/checkpoints --no-last-checkpoints \
		--tensorboard-logdir $(RUN)/tensorboard $(if $(WANDB),--wandb-project $(call quoted,$(WANDB))) \
		--log-format json --log-interval $(LOG_EVERY) $(TRAIN_ARGS) 2>&1 \
		| tee -a $(RUN)/train$(patsubst %,-node%,$(filter-out 0,$(NODE))).log \
		| $(STEP).progress $(if $(EPOCHS),--epochs $(EPOCHS),--updates $(UPDATES)) $(LESS:%=--less %)
	touch $@

include recipes/preflight/preflight.mk

# -- model -----------------------------------------------------------------------------------------------------------

$(RUN)/average.pt: $(TRAINED) $(RUN)/settings.average.json
	# average the last $(AVERAGE) checkpoints
	$(PYTHON) -m fairseq_admin.cli average $(RUN)/checkpoints --by $(KIND) --last $(AVERAGE) -o $@ --data $(BINARY)

$(RUN)/omega.json: $(RUN)/average.pt
	$(PYTHON) -m fairseq_admin.cli omega $< --json > $@.part
	mv $@.part $@

# Folding compares the two models on the validation set. A folded one needs no plugin. Another does.
FOLDED := $(filter $(call field,FOLDS,$(TABLE_OF_SCHEMES)),$(METHOD))
USER_DIR := $(if $(FOLDED),,--user-dir fairseq_admin)
$(FINAL): $(RUN)/average.pt
	# the model, and what it takes to use it
	mkdir -p $(@D)
	$(if $(ASSETS),cp $(ASSETS) $(@D))
	$(if $(FOLDED),$(PYTHON) -m fairseq_admin.cli fold $< -o $@ --data $(BINARY) | tee $(RUN)/fold.txt,cp $< $@.part && mv $@.part $@)
