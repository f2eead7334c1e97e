# Before training: what is missing, how much disk and how many tokens does it take, and how long?
#
# Reads what train.mk and machines.mk give; PRICE, of a device an hour. Gives the target preflight.

.PHONY: preflight
preflight:
	@$(PYTHON) -m recipes.preflight.page $(or $(JOB),$(NAME)) --binary $(BINARY) --run $(RUN) --words $(MERGES) --keep $(AVERAGE) \
		$(if $(EPOCHS),--epochs $(EPOCHS),--updates $(UPDATES)) --max-tokens $(MAX_TOKENS) --update-freq $(UPDATE_FREQ) \
		--devices $(GPUS) --nodes $(NODES) --precision $(or $(PRECISION),fp32) $(ON_CPU) $(PRICE:%=--price %) \
		$(if $(USED),--archives $(USED) --downloads $(ARCHIVES)) $(TABLE:%=--table %) $(DATA:%=--data %) \
		-- $(TASK) --user-dir fairseq_admin --arch $(ARCH) --admin-scheme $(METHOD) $(WEIGHTS) $(MODEL) $(OPTIMISATION) \
		$(BATCH_SIZE) $(PRECISE) $(MACHINES) $(TRAIN_ARGS)
