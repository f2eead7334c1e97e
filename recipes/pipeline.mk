# A translation recipe: raw text -> tokens -> joint BPE -> fairseq's binary data -> training -> average -> fold ->
# translations -> sacreBLEU -> summary. One file a target; interrupt anywhere, run again, it goes on.
#
# A recipe includes common.mk, sets NAME, PAIR, COMMAND, PRESET and the sizes, includes this file, and says how $(RAW)/% is
# made: the raw text of both languages, of the splits train, valid and test or of the parts they are gathered from.

SOURCE := $(word 1,$(subst -, ,$(PAIR)))
TARGET := $(word 2,$(subst -, ,$(PAIR)))
$(if $(filter $(SOURCE),$(TARGET)),$(error PAIR=$(PAIR) names one language twice, and so one file for both sides; expected two codes. Call one side otherwise, as in PAIR=en-en_simple: the tokeniser treats a code it does not know as English))

$(call a-multiple,WIDTH,HEADS)
TASK := --source-lang $(SOURCE) --target-lang $(TARGET)
ARCH := transformer_admin_18l
ENCODER_LAYERS ?= $(LAYERS)
DECODER_LAYERS ?= $(LAYERS)
MODEL := --encoder-layers $(ENCODER_LAYERS) --decoder-layers $(DECODER_LAYERS) \
	--encoder-embed-dim $(WIDTH) --decoder-embed-dim $(WIDTH) \
	--encoder-ffn-embed-dim $(FFN) --decoder-ffn-embed-dim $(FFN) \
	--encoder-attention-heads $(HEADS) --decoder-attention-heads $(HEADS) \
	--dropout $(DROPOUT) $(ATTENTION_DROPOUT:%=--attention-dropout %) $(ACTIVATION_DROPOUT:%=--activation-dropout %) \
	--share-all-embeddings
# A multiple of 1: with fairseq's own, 8, the last sentences (up to 7) fall in no batch, and are not translated either.
BATCH = --max-tokens $(MAX_TOKENS) --required-batch-size-multiple 1
# fairseq ends over a line of the other two splits that fits no batch, so theirs hold at least as many units as a model has
# positions; lines that are too long for that, prepare has refused or counted (TOO_LONG), and they are skipped.
POSITIONS := 1024
FITTING = $(shell echo $$(( $(MAX_TOKENS) < $(POSITIONS) ? $(POSITIONS) : $(MAX_TOKENS) )))
VALIDATED = --max-tokens-valid $(FITTING) --skip-invalid-size-inputs-valid-test
TRANSLATED = --max-tokens $(FITTING) --skip-invalid-size-inputs-valid-test
FINAL = $(RUN)/model/model.pt
SUMMARY_ARGS = --raw $(RAW)/test --pair $(PAIR)

include recipes/text.mk
include recipes/train.mk
include recipes/evaluate.mk
include recipes/summary.mk
