# Archives -> raw text -> tokens -> splits -> joint BPE -> fairseq's binary data.
#
# Reads SOURCE and TARGET, MERGES, the variables below, DATA, URL, TABLE and USED (a recipe's archives), TEXT_SETTINGS (more
# that the text depends on), and the recipe's rules for $(RAW)/%.
# Gives the folder $(BINARY), which is whole once $(BINARISED) is there; $(ASSETS), what translating takes in addition to a model;
# $(WORDS), the tokens; `archive` and `EXTRACT` for the recipe's rules; `both`; and the target prepare.

.SECONDEXPANSION:

RAW ?= $(TEXT)/raw
# Where a split is not a text of its own: the texts it is gathered from, and which of their pairs, as in
# PARTS_valid := europarl commoncrawl and GATHER_valid := --every 23 --keep nth.
# Which training pairs are kept, by their words (CLEAN) or by their units after BPE (CLEAN_BPE, of the split valid, too).
CLEAN ?= --drop-empty
CLEAN_BPE ?=
# What to do with a line of the splits valid and test that is too long for the model: refuse, or skip.
TOO_LONG ?= refuse
$(call one-of,TOO_LONG,refuse skip)
# The numbers of pairs that train, valid and test must have, where they are known.
EXPECT ?=
# The git blob ids of published files of the text, as split/train.de=ID, which it is compared with.
BLOBS ?=
# What else tokenising does: lowercase, normalise, aggressive_dashes, escape, perl (fairseq_admin/text/tokens.py says what
# each is).
TOKENISER ?=

# Both sides of texts in a folder. make keeps them, though it could make them again.
both = $(foreach text,$(2),$(1)/$(text).$(SOURCE) $(1)/$(text).$(TARGET))
SPLITS := train valid test
SEVERAL := $(sort $(foreach split,$(SPLITS),$(PARTS_$(split))))
.SECONDARY: $(call both,$(RAW),$(SPLITS) $(SEVERAL)) $(call both,$(TEXT)/tok,$(SPLITS) $(SEVERAL)) \
	$(call both,$(TEXT)/split,$(SPLITS))

BINARY := $(TEXT)/bin
BINARISED := $(BINARY)/dict.$(TARGET).txt
ASSETS := $(BINARY)/dict.$(SOURCE).txt $(BINARISED) $(TEXT)/codes $(TEXT)/text.json

.PHONY: prepare
ifdef GUARDED
prepare: $(BINARISED) $(call both,$(RAW),test)
else
prepare:
	+@$(call GUARD,--alone $(TEXT) --wait) $@
endif

# -- archives --------------------------------------------------------------------------------------------------------

ARCHIVES := $(RUNS)/archives
# What is read is recorded, for the text's settings.
EXTRACT = $(STEP).extract $(EXTRACT_ARGS) --record $(RAW)/inputs.json
# Where an archive is: in the folder DATA, or the folder itself, if that holds not the archive but what is in it; or among
# those downloaded. What was extracted once needs a download no more; whoever is short of room may delete it.
archive = $(if $(DATA),$(or $(wildcard $(DATA)/$(1)),$(DATA)),$(ARCHIVES)/$(1))
.SECONDARY: $(USED:%=$(ARCHIVES)/%)
$(ARCHIVES)/%:
	# download $*
	$(STEP).download $* --out $@ $(if $(URL),--url $(call quoted,$(URL))) $(TABLE:%=--table %)

# -- settings --------------------------------------------------------------------------------------------------------

# What a text was made from. Where that changes, before there is a model of it, all of the text is made again.
$(TEXT)/settings.json: FORCE
	@$(STEP).settings $@ --models $(RUNS)/$(NAME) --inputs $(RAW)/inputs.json --archives $(ARCHIVES) $(DATA:%=--data %) \
		pair=$(PAIR) merges=$(MERGES) $(call quoted,tokeniser=$(sort $(TOKENISER))) \
		$(call quoted,cleaning=$(strip $(CLEAN) $(CLEAN_BPE) $(GATHER_train))) $(TEXT_SETTINGS)

RAW_SETTINGS ?= $(TEXT)/settings.json
$(call both,$(RAW),$(SPLITS) $(SEVERAL)): $(RAW_SETTINGS)

# -- tokens ----------------------------------------------------------------------------------------------------------

$(TEXT)/text.json: $(TEXT)/settings.json
	# how text is tokenised
	$(STEP).text $(SOURCE) $(TARGET) $(TOKENISER) -o $@

$(call both,$(TEXT)/tok,$(or $(PARTS_train),train)): TOKENISE := $(CLEAN)
$(TEXT)/tok/%.$(SOURCE) $(TEXT)/tok/%.$(TARGET): $(RAW)/%.$(SOURCE) $(RAW)/%.$(TARGET) $(TEXT)/text.json
	# tokens of $*
	$(STEP).tokenise $(TEXT)/text.json $(RAW)/$* $(TEXT)/tok/$* $(TOKENISE)

# All texts are there, and no archive is missing, before the first long step begins.
$(call both,$(TEXT)/tok,$(or $(PARTS_train),train)): | $(call both,$(RAW),$(or $(SEVERAL),$(SPLITS)) test)

# A split that is gathered from parts, in their order: all pairs, or every nth one, or the rest.
$(TEXT)/split/%.$(SOURCE) $(TEXT)/split/%.$(TARGET): $$(call both,$(TEXT)/tok,$$(PARTS_$$*))
	# the split $*
	$(STEP).split $(addprefix $(TEXT)/tok/,$(PARTS_$*)) --languages $(SOURCE) $(TARGET) -o $(TEXT)/split/$* $(GATHER_$*)

# -- units -----------------------------------------------------------------------------------------------------------

# What byte-pair encoding is learnt from and applied to.
WORDS := $(TEXT)/$(if $(SEVERAL),split,tok)

$(TEXT)/codes: $(call both,$(WORDS),train)
	# learn $(MERGES) joint merges
	$(STEP).bpe learn $(MERGES) $^ -o $@

$(call both,$(TEXT)/bpe,train valid): SPLIT_UP := $(CLEAN_BPE)
# fairseq leaves out such pairs of the training text, and says how many.
$(call both,$(TEXT)/bpe,valid test): SPLIT_UP += --too-long $(TOO_LONG)
$(TEXT)/bpe/%.$(SOURCE) $(TEXT)/bpe/%.$(TARGET): $(WORDS)/%.$(SOURCE) $(WORDS)/%.$(TARGET) $(TEXT)/codes
	# units of the split $*
	$(STEP).bpe apply $(TEXT)/codes $(WORDS)/$*.$(SOURCE) $(WORDS)/$*.$(TARGET) -o $(@D) $(SPLIT_UP)

$(BINARISED): $(call both,$(TEXT)/bpe,$(SPLITS))
	# fairseq's binary data
	$(if $(EXPECT)$(BLOBS),$(STEP).counts $(TEXT) $(SOURCE) $(TARGET) $(if $(EXPECT),$(join $(SPLITS:%=$(notdir $(WORDS))/%=),$(EXPECT))) $(BLOBS))
	$(call binarise,--source-lang $(SOURCE) --target-lang $(TARGET) --joined-dictionary --trainpref $(TEXT)/bpe/train \
		--validpref $(TEXT)/bpe/valid --testpref $(TEXT)/bpe/test --workers $$(getconf _NPROCESSORS_ONLN))
