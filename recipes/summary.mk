# A run's score and log -> its summary, next to those of the other methods.
#
# Reads $(RUN)/score.json, for which a recipe has the rule; COMMAND, what the user calls it by; SUMMARY_ARGS, more
# options of recipes/steps/summary.py.
# Gives $(RUN)/summary.txt with its figures; RESULT, how a row of results.csv is named; and the target all.

# What the run is called in results.csv.
JOB ?= $(NAME)
RESULT = --results $(RUNS)/results.csv --recipe $(JOB) --method $(METHOD) --preset $(PRESET) --seed $(SEED) \
	--tokens $(or $(TOKENS),$$(( $(MAX_TOKENS) * $(UPDATE_FREQ) * $(or $(WORLD),1) )))

$(eval $(call goal,all,$(RUN)/summary.txt,@cat $(RUN)/summary.txt))

# The other methods' results, once they are there, are part of the summary.
OTHERS := $(wildcard $(dir $(RUN))*-$(PRESET)-s$(SEED)/score.json)
PROFILED := $(filter $(call field,OMEGA,$(TABLE_OF_SCHEMES)),$(METHOD))
$(RUN)/summary.txt: $(RUN)/score.json $(if $(PROFILED),$(RUN)/omega.json) $(OTHERS)
	$(STEP).summary $(RUN) --command "$(COMMAND)" $(SUMMARY_ARGS)
