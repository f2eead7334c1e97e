# On a CPU or on GPUs, and in what precision.
#
# Reads PRECISION and DEVICE_ARGS, fairseq's options that say where it trains.
# Gives PRECISION_<precision>, fairseq's options for it; ON_CPU, not empty where DEVICE_ARGS or TRAIN_ARGS say --cpu; and there
# it hides the GPUs.

PRECISION ?=
PRECISIONS := fp16 me-fp16 amp bf16 fp32
SCALED := --fp16-scale-window 256 --threshold-loss-scale 0.03125
PRECISION_fp16 := --fp16 --fp16-no-flatten-grads $(SCALED)
PRECISION_me-fp16 := --memory-efficient-fp16 $(SCALED)
PRECISION_amp := --amp
PRECISION_bf16 := --bf16 --fp16-no-flatten-grads
$(if $(PRECISION),$(call one-of,PRECISION,$(PRECISIONS)))

# With --cpu fairseq still clips gradients on a GPU that it sees, and starts a process for each of several.
ON_CPU := $(filter --cpu,$(DEVICE_ARGS) $(TRAIN_ARGS))
ifneq ($(ON_CPU),)
export CUDA_VISIBLE_DEVICES :=
endif
