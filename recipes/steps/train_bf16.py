"""fairseq-train, with the same options, able to train in bf16 on a GPU.

    python -m recipes.steps.train_bf16 data-bin --user-dir fairseq_admin --arch transformer_admin_18l --bf16 ...

fairseq-train takes --bf16 for the wish to train on a TPU, fails without one, and leaves bf16 to fairseq-hydra-train,
whose options have other names. Here the wish is taken back before training starts.
"""

from __future__ import annotations


def main() -> None:
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.distributed.utils import call_main
    from fairseq_cli.train import main as train

    args = options.parse_args_and_arch(options.get_training_parser())
    args.tpu = False
    call_main(convert_namespace_to_omegaconf(args), train)


if __name__ == "__main__":
    main()
