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
import pytest
import torch
from test_modes import TO_10, last, same, two_processes

pytest.importorskip("fairscale", reason="fairscale is not installed")

SMALL = ["--max-tokens", 150]


def _reduce_scatter(output: torch.Tensor, flat: torch.Tensor, group=None) -> None:
    """Each rank's share of the sum, which gloo has no call for."""
    torch.distributed.all_reduce(flat, group=group)
    output.copy_(flat.view(torch.distributed.get_world_size(group), -1)[torch.distributed.get_rank(group)])


def _on_cpu(arguments: list[str], log: Path) -> None:
    """fairseq-train with a fairscale that runs on a CPU."""
    from fairscale.internal.reduce_scatter_bucketer import ReduceScatterBucketer
    from fairscale.nn.data_parallel import fully_sharded_data_parallel as fairscale

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
@pytest.mark.parametrize("options", [[], ["--checkpoint-activations"]], ids=["one share", "a share a layer"])
def test_two_sharded_processes(
    options: list[str], corpus: Path, plain: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Do they train like two that share nothing, bit for bit, even when stopped and resumed?"""
    sharded = [*SMALL, *TO_10, *options, "--ddp-backend", "fully_sharded", "--save-dir", tmp_path / "sharded"]
    logs = [tmp_path / "sharded", tmp_path / "rank1"]
    outputs = two_processes(corpus, logs, *sharded, "--save-interval-updates", 7, target=_on_cpu)
    assert outputs[0].count("profiled by rule") == 1
    whole = last(tmp_path / "sharded")["model"]
    assert whole.keys() == plain.keys()
    for key, tensor in whole.items():
        # Recomputed activations sum their gradients in another order.
        torch.testing.assert_close(tensor, plain[key], rtol=0, atol=1e-4 if options else 0, msg=key)
    (tmp_path / "sharded/checkpoint_1_7.pt").rename(tmp_path / "sharded/checkpoint_last.pt")
    resumed = two_processes(corpus, logs, *sharded, target=_on_cpu)[0]
    assert "(epoch 1 @ 7 updates)" in resumed and "profiled by rule" not in resumed
    assert same(last(tmp_path / "sharded")["model"], whole)
