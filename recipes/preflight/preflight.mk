# Before training: can it work here, and how long will it take?
#
# Reads what train.mk and machines.mk give; PRICE, of a device an hour; TRIAL_UPDATES and TRIAL_SECONDS, how long to try.
# Gives the target preflight, a page; and SHORT_PREFLIGHT, a command for two lines of it.

TRIAL_UPDATES ?= 20
TRIAL_SECONDS ?= 120

PREFLIGHT = $(PYTHON) -m recipes.preflight.page $(NAME) --title $(or $(JOB),$(NAME)) $(PAIR:%=--pair %) --binary $(BINARY) \
	--run $(RUN) --keep $(AVERAGE) --save-every $(SAVE_EVERY) $(if $(EPOCHS),--epochs $(EPOCHS),--updates $(UPDATES)) \
	--max-tokens $(MAX_TOKENS) --update-freq $(UPDATE_FREQ) --devices $(GPUS) --nodes $(NODES) $(MEMORY:%=--memory %) $(PRICE:%=--price %) --trial-updates $(TRIAL_UPDATES) \
	--trial-seconds $(TRIAL_SECONDS) $(if $(USED),--archives $(USED)) $(TABLE:%=--table %) $(if $(URL),--url $(call quoted,$(URL))) $(DATA:%=--data %) \
	$(MODEL_SIZES) $(if $(CHECKPOINT),--checkpoint)
SHORT_PREFLIGHT = $(PREFLIGHT) --short

.PHONY: preflight
preflight:
	@$(PREFLIGHT) -- $(TASK) --user-dir fairseq_admin --arch $(ARCH) --admin-scheme $(METHOD) $(WEIGHTS) $(MODEL) $(OPTIMISATION) \
		$(BATCH_SIZE) $(PRECISE) $(MACHINES) $(TRAIN_ARGS)
