"""Reading and writing checkpoints safely; a stock model's weights taken over; averaging."""

import argparse
import importlib
import logging
import os
import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, MutableMapping

import numpy
import torch
from torch import Tensor

from . import provenance
from .errors import AdminError

logger = logging.getLogger(__name__)

OMEGA_INIT = ".omega_init"
OMEGA_DELTA = ".omega_delta"

# What fairseq up to 0.12.2 stores beside the weights: a position buffer's type, and copies for an inference path.
STRAY = re.compile(r"\.(embed_positions\._float_tensor|layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias))$")


def allow_fairseq_globals() -> None:
    """Let torch's safe loader (weights_only, the default since torch 2.6) build what fairseq's checkpoints hold.

    These are plain containers without behaviour: option namespaces, numpy scalars and arrays (learning rates and
    losses), the placeholder fairseq broadcasts tensors with, and omegaconf's containers.
    """
    from fairseq.distributed.utils import _TensorPlaceholder
    from omegaconf import AnyNode, DictConfig, ListConfig
    from omegaconf.base import ContainerMetadata, Metadata

    multiarray = importlib.import_module(f"{'numpy.core' if numpy.__version__ < '2' else 'numpy._core'}.multiarray")
    dtypes = [type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdU"]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, _TensorPlaceholder]
        + [multiarray.scalar, multiarray._reconstruct, numpy.ndarray, numpy.dtype, *dict.fromkeys(dtypes)]
        + [DictConfig, ListConfig, AnyNode, ContainerMetadata, Metadata, defaultdict]
        # typing.Any is a class since Python 3.11 only
        + [dict, list, str, int, float, bool, Any if isinstance(Any, type) else (Any, "typing.Any")]
    )


def read(path: Path) -> Dict[str, Any]:
    """A fairseq checkpoint's contents, on the CPU, loaded without running code it may carry.

    Raises:
        AdminError: the file is missing, truncated, no checkpoint, or holds objects a checkpoint has no need of.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise AdminError(f"{path}: no such file; a fairseq checkpoint (.pt) was expected.") from None
    except IsADirectoryError:
        raise AdminError(f"{path} is a folder; a fairseq checkpoint (.pt) was expected.") from None
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"holds an object of {found[1]}" if found else "is not a torch file"
        raise AdminError(
            f"{path} {what}; a fairseq checkpoint was expected. Nothing in it was run. Give a file that fairseq-train "
            "wrote, and copy it again if it is one."
        ) from None
    except Exception as error:  # the unpickler of a file that is something else raises almost anything
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AdminError(f"{path}: not a whole checkpoint ({line}). Copy or train it again.") from None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise AdminError(f"{path}: a torch file, but no fairseq checkpoint (it has no entry 'model').")
    return state


def write(state: Mapping[str, Any], path: Path) -> None:
    """Save a checkpoint so that the path holds either all of it or what it held before.

    Raises:
        AdminError: the path is no place for a file, or the disk is full.
    """
    if path.exists() and not path.is_file():
        raise AdminError(f"{path} is a folder or a device; a file to write was expected.")
    part = path.with_name(path.name + ".part")
    try:
        torch.save(state, part)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise AdminError(f"{path}: could not be written ({error}). Is the disk full, or the folder missing?") from None


def adopt(state: MutableMapping[str, Tensor], expected: Mapping[str, Tensor], depths: Mapping[str, int]) -> None:
    """Check a state dict's depth, drop what only an older fairseq stores, and complete a stock Post-LN Transformer's
    with ω = 1 for a model that has ω, all in place.

    Args:
        state: the state dict about to be loaded.
        expected: the model's own.
        depths: layers expected a stack; a stack that is to be pruned is left out.

    Raises:
        AdminError: another depth, or a Pre-LN Transformer.
    """
    for stack, layers in depths.items():
        found = len({key.split(".")[2] for key in state if key.startswith(f"{stack}.layers.")})
        if found != layers:
            raise AdminError(
                f"the checkpoint's {stack} has {found} layers and the model's has {layers}. Use the checkpoint's "
                f"--{stack}-layers {found} (or its --arch), or another --save-dir to start anew."
            )
    for key in [key for key in state if key not in expected and STRAY.search(key)]:
        del state[key]
    if any(key.endswith(OMEGA_INIT) for key in state) or not any(key.endswith(OMEGA_INIT) for key in expected):
        return
    for stack in depths:
        if f"{stack}.layer_norm.weight" in state:
            raise AdminError(
                f"the checkpoint is a Pre-LN Transformer (it has {stack}.layer_norm); Admin takes Post-LN weights only."
            )
    logger.info("Admin: the checkpoint has no omega (a stock Transformer): every omega is 1, nothing will be profiled")
    for key, tensor in expected.items():
        if key.endswith(OMEGA_INIT):
            state[key] = torch.ones_like(tensor)
        elif key.endswith(OMEGA_DELTA):
            state[key] = torch.zeros_like(tensor)
    state[provenance.KEY] = provenance.encode({"rule": "stock checkpoint, omega = 1"})


def omegas(state: Mapping[str, Tensor]) -> Dict[str, Dict[str, Tensor]]:
    """ω of every sub-layer in a state dict: {"encoder": {"layers.0.self_attn": ω, ...}, "decoder": ...}.

    Each ω has shape (C,), float64; sub-layers stand in forward order. Empty if the model is not an Admin model.
    """
    found: Dict[str, Dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if key.endswith(OMEGA_INIT):
            norm = key[: -len(OMEGA_INIT)]
            stack, name = norm.split(".", 1)
            delta = state.get(norm + OMEGA_DELTA)
            omega = tensor.double() if delta is None else tensor.double() + delta.double()
            found.setdefault(stack, {})[name.replace("_layer_norm", "").replace("final", "ffn")] = omega
    return {stack: dict(sorted(found[stack].items(), key=_forward_order)) for stack in sorted(found, reverse=True)}


def _forward_order(item: Any) -> tuple:
    _, layer, sublayer = item[0].split(".")
    return int(layer), ("self_attn", "encoder_attn", "ffn").index(sublayer)


def newest(folder: Path, last: int) -> List[Path]:
    """The last checkpoints of a run, by epochs (checkpoint7.pt) or, without those, by updates (checkpoint_3_900.pt).

    Raises:
        AdminError: fewer checkpoints than asked for.
    """
    found: List[Path] = []
    for pattern in (r"checkpoint(\d+)\.pt", r"checkpoint_\d+_(\d+)\.pt"):
        matches = [(int(m[1]), path) for path in folder.glob("*.pt") if (m := re.fullmatch(pattern, path.name))]
        found = [path for _, path in sorted(matches)]
        if found:
            break
    if len(found) < last:
        raise AdminError(
            f"{folder} holds {len(found)} numbered checkpoints and the last {last} were asked for. Lower --last, or "
            "train with --keep-last-epochs or --keep-interval-updates that high."
        )
    return found[-last:]


def average(paths: Iterable[Path]) -> Dict[str, Any]:
    """The newest checkpoint with its model replaced by the mean of all.

    Beside the sum, the file at hand and the newest so far are in memory, however many there are.

    Accumulated in float64, stored in the newest's types; entries that are no floats are the newest's. Optimizer state
    is dropped: an average is not a point to resume from.

    Args:
        paths: checkpoints in any order, at least one, all of one architecture.

    Raises:
        AdminError: a file is no checkpoint, or its entries or shapes differ from the first's.
    """
    paths = list(paths)
    total: Dict[str, Tensor] = {}
    newest_state: Dict[str, Any] = {}
    newest_updates = -1
    for path in paths:
        state = read(path)
        model = state["model"]
        for key in sorted(total.keys() ^ model.keys()) if total else []:
            raise AdminError(f"{path} and {paths[0]} are not of one model: only one of them has {key}.")
        for key, tensor in model.items():
            if key not in total:
                total[key] = tensor.double()
            elif total[key].shape != tensor.shape:
                raise AdminError(
                    f"{path}: {key} has shape {tuple(tensor.shape)}, and {tuple(total[key].shape)} in {paths[0]}."
                )
            else:
                total[key] += tensor.double()
        updates = (state.get("optimizer_history") or [{}])[-1].get("num_updates", 0)
        if updates > newest_updates:
            newest_updates, newest_state = updates, state
            state.pop("last_optimizer_state", None)
    model = newest_state["model"]
    for key, tensor in model.items():
        if tensor.is_floating_point():
            model[key] = (total.pop(key) / len(paths)).to(tensor.dtype)
    return newest_state
