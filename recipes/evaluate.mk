# The model -> translations of the test set -> sacreBLEU.
#
# Reads $(FINAL) and USER_DIR, $(BINARY), $(WORDS), $(TEXT)/bpe/test and $(RAW)/test, TRANSLATED, BEAM, LENPEN, GENERATE_ARGS, COMPOUNDS.
# Gives $(RUN)/generate.txt, translations.txt and score.json, the run's row of results.csv, and the targets generate and
# score.

BEAM ?= 5
LENPEN ?= 1

$(eval $(call goal,generate,$(RUN)/generate.txt))
$(eval $(call goal,score,$(RUN)/score.json))

SETTINGS_generate = beam=$(BEAM) lenpen=$(LENPEN) -- $(GENERATE_ARGS)
SETTINGS_score = -- $(COMPOUNDS)

$(RUN)/generate.txt: $(FINAL) $(RUN)/settings.generate.json
	# translate the test set
	$(PYTHON) -m fairseq_cli.generate $(BINARY) $(USER_DIR) --path $< --gen-subset test \
		$(TASK) --beam $(BEAM) --lenpen $(LENPEN) \
		$(BATCH) $(TRANSLATED) $(GENERATE_ARGS) 2>&1 | tee $@.part | $(STEP).progress
	test -s $@.part
	mv $@.part $@

$(RUN)/score.json: $(RUN)/generate.txt $(call both,$(RAW),test) $(RUN)/settings.score.json | \
		$(TEXT)/text.json $(call both,$(TEXT)/bpe,test)
	# score
	$(STEP).score $(RUN) --raw $(RAW)/test --tokenised $(WORDS)/test.$(TARGET) --units $(TEXT)/bpe/test \
		--text $(TEXT)/text.json $(COMPOUNDS) $(RESULT)
