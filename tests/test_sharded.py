"""`--ddp-backend fully_sharded` on two CPU processes, where fairscale is installed. It works on GPUs only: what it asks
of CUDA is stubbed below, and gloo stands in for NCCL.

fairscale flattens the parameters of the model, gives each rank a share of them, puts them together (as views of one
tensor) while a module runs, and loads a checkpoint into the modules inside it.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from unittest import mock

import conftest
import language
import pytest
import test_masked_lm_commands
import torch
from test_modes import TO_10, last, same, two_processes

pytest.importorskip("fairscale", reason="fairscale is not installed")

SMALL = ["--max-tokens", 150]
SHARE_A_LAYER = ["--ddp-backend", "fully_sharded", "--min-params-to-wrap", 1]


def _reduce_scatter(output: torch.Tensor, flat: torch.Tensor, group=None) -> None:
    """Each rank's share of the sum, which gloo has no call for."""
    torch.distributed.all_reduce(flat, group=group)
    output.copy_(flat.view(torch.distributed.get_world_size(group), -1)[torch.distributed.get_rank(group)])


def _on_cpu(arguments: list[str], log: Path) -> None:
    """fairseq-train with a fairscale that runs on a CPU."""
    from fairscale.internal.reduce_scatter_bucketer import ReduceScatterBucketer
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale

    from fairseq_admin.fast import again

    again.WORTH = 0  # as large tensors are treated
    stream = mock.MagicMock()

    def set_up_streams(self) -> None:
        self._streams.update(dict.fromkeys(("fp32_to_fp16", "all_gather", "post_backward"), stream))
        self._reducer = getattr(self, "_reducer", None) or ReduceScatterBucketer(self.bucket_cap_mb)
        for module in self.modules():
            if isinstance(module, fairscale.FullyShardedDataParallel):
                module._streams, module._reducer = self._streams, self._reducer

    fairscale.FullyShardedDataParallel._setup_streams = set_up_streams
    fairscale._get_default_cuda_device = lambda module: torch.device("cpu")
    torch.distributed._reduce_scatter_base = _reduce_scatter
    torch.Tensor.cuda = lambda self: self  # type: ignore[assignment,method-assign]
    torch.Tensor.cpu = lambda self: self.clone()  # type: ignore[assignment,method-assign]  # as from a GPU
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment,method-assign]
    torch.cuda.synchronize = lambda: None  # type: ignore[assignment]
    torch.cuda.current_stream = lambda: stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,misc]
    conftest._child("fairseq_cli.train", arguments, log)


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The model after ten updates of two processes that share nothing."""
    folders = [tmp_path_factory.mktemp(f"plain{rank}") for rank in (0, 1)]
    two_processes(corpus, folders, *SMALL, *TO_10)
    return last(folders[0])["model"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [[], ["--checkpoint-activations"], SHARE_A_LAYER],
    ids=["one share", "a share a layer, checkpointed", "a share a layer"],
)
def test_two_sharded_processes(options: list, corpus: Path, plain: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Do they train like two that share nothing, bit for bit, even when stopped and resumed?"""
    sharded = [*SMALL, *TO_10, *options, "--ddp-backend", "fully_sharded", "--save-dir", tmp_path / "sharded"]
    logs = [tmp_path / "sharded", tmp_path / "rank1"]
    outputs = two_processes(corpus, logs, *sharded, "--save-interval-updates", 7, target=_on_cpu)
    assert outputs[0].count("profiled by rule") == 1
    whole = last(tmp_path / "sharded")["model"]
    assert whole.keys() == plain.keys()
    # Recomputed activations sum their gradients in another order.
    tolerance = 1e-4 if "--checkpoint-activations" in options else 0
    for key, tensor in whole.items():
        torch.testing.assert_close(tensor, plain[key], rtol=0, atol=tolerance, msg=key)
    (tmp_path / "sharded/checkpoint_1_7.pt").rename(tmp_path / "sharded/checkpoint_last.pt")
    resumed = two_processes(corpus, logs, *sharded, target=_on_cpu)[0]
    assert "(epoch 1 @ 7 updates)" in resumed and "profiled by rule" not in resumed
    assert same(last(tmp_path / "sharded")["model"], whole)


@pytest.mark.slow
def test_masked_models_begin_alike(tmp_path: Path) -> None:
    """RoBERTa draws all weights once more when layers are sharded; are the feed-forward ones Xavier's after that?"""
    words = language.binarised(tmp_path)
    plain, sharded = ([tmp_path / f"{name}{rank}" for rank in (0, 1)] for name in ("plain", "sharded"))
    given = ["--max-update", 1]  # radam's first changes nothing
    two_processes(words, plain, *given, options=test_masked_lm_commands.TRAIN)
    given += [*SHARE_A_LAYER, "--save-dir", sharded[0]]
    two_processes(words, sharded, *given, target=_on_cpu, options=test_masked_lm_commands.TRAIN)
    expected, found = (last(folders[0])["model"] for folders in (plain, sharded))
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
