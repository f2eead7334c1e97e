# A run's score and log -> its summary and its report, next to those of the other methods.
#
# Reads $(RUN)/score.json, for which a recipe has the rule; $(RUN)/average.pt and $(BINARY); COMMAND, what the user calls it
# by; SUMMARY_ARGS, more options of recipes/steps/summary.py.
# Gives $(RUN)/summary.txt with its figures and $(RUN)/report.html; RESULT, how a row of results.csv is named; and the
# target all.

# What the run is called in results.csv.
JOB ?= $(NAME)
RESULT = --results $(RUNS)/results.csv --recipe $(JOB) --method $(METHOD) --preset $(PRESET) --seed $(SEED) \
	--tokens $(or $(TOKENS),$$(( $(MAX_TOKENS) * $(UPDATE_FREQ) * $(or $(WORLD),1) )))

# The report is the last thing: whatever becomes of it, the run is whole, and its summary there.
define SHOW
@cat $(RUN)/summary.txt
@echo; echo "Report: $(RUN)/report.html"
endef
$(eval $(call goal,all,$(RUN)/report.html,$$(SHOW)))

# The other methods' results, once they are there, are part of the summary and of the report.
OTHERS := $(wildcard $(dir $(RUN))*-$(PRESET)-s$(SEED)/score.json)
PROFILED := $(filter $(call field,OMEGA,$(TABLE_OF_SCHEMES)),$(METHOD))
$(RUN)/summary.txt: $(RUN)/score.json $(if $(PROFILED),$(RUN)/omega.json) $(OTHERS)
	$(STEP).summary $(RUN) --command "$(COMMAND)" $(SUMMARY_ARGS)

# What the report shows of the papers' analysis, on a few tokens. A scheme or a text that it cannot be made of says so in
# a line, here and in the report.
ANALYSES ?= dependency output-change
ANALYSED := $(ANALYSES:%=$(RUN)/analysis/%.json)
$(ANALYSED): $(RUN)/analysis/%.json: $(RUN)/average.pt
	# analyse: $*
	mkdir -p $(@D)
	-$(PYTHON) -m fairseq_admin.cli analyze $* $< --data $(BINARY) --tokens 256 --json -o $(basename $@)

$(RUN)/report.html: $(RUN)/summary.txt $(ANALYSED)
	# the report
	$(PYTHON) -m fairseq_admin.cli report $(RUN) $(filter-out $(RUN),$(OTHERS:/score.json=)) -o $@ \
		|| { echo "The report could not be made; the run is whole: $(RUN)/summary.txt" >&2; exit 2; }
