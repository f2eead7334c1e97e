"""The main options of a checkpoint's training, for a report."""

from __future__ import annotations

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.options import plain

SECTIONS = {
    "model": (
        *("_name", "admin_scheme", "admin_init", "encoder_layers", "decoder_layers"),
        *("more_layers", "more_scheme", "more_dropout", "pretrained_lr_factor", "profile_sentences"),
        *("encoder_embed_dim", "decoder_embed_dim", "encoder_ffn_embed_dim", "decoder_ffn_embed_dim"),
        *("encoder_attention_heads", "decoder_attention_heads", "dropout", "attention_dropout", "activation_dropout"),
        *("share_all_embeddings", "share_decoder_input_output_embed", "layernorm_embedding"),
    ),
    "task": ("_name", "source_lang", "target_lang", "data"),
    "criterion": ("_name", "label_smoothing"),
    "optimizer": ("_name", "adam_betas", "weight_decay"),
    "lr_scheduler": ("_name", "warmup_updates"),
    "optimization": ("lr", "clip_norm", "update_freq", "max_update", "max_epoch"),
    "dataset": ("max_tokens", "batch_size"),
    "distributed_training": ("distributed_world_size",),
    "common": ("seed", "fp16", "memory_efficient_fp16", "bf16", "amp", "cpu", "user_dir"),
}
"""The options shown, by section of fairseq's configuration."""

NAMED = {"model": "arch", "optimizer": "optimizer", "lr_scheduler": "lr_scheduler"}
"""The command line's option for the `_name` of a section, if it is not the section's name."""


def options_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The options by name, as on fairseq's command line, without those that are off or not set."""
    args, cfg = checkpoint.state.get("args"), checkpoint.state.get("cfg") or {}
    options = {}
    for section, names in SECTIONS.items():
        config = vars(args) if args is not None else plain(cfg.get(section))
        for name in names:
            option = NAMED.get(section, section) if name == "_name" else name
            value = config.get(option if args is not None and name == "_name" else name)
            if isinstance(value, (list, tuple)):
                value = ",".join(map(str, value))
            if value not in (None, False, "", 0, "0"):
                options[f"--{option.replace('_', '-')}"] = "on" if value is True else str(value)
    return options
