"""The batches that fairseq makes of binary data: how many sentences, and how long."""

from __future__ import annotations

from pathlib import Path

from recipes.steps.activations import Batch


def batches(folder: Path, pair: tuple[str, str], max_tokens: int, length: int) -> set[Batch]:
    """Those of a training set, each kind once. In every epoch they are the same, of other pairs of the same lengths.

    Args:
        length: units that a language model, whose text is one file (`pair` names one language twice), reads at once.
    """
    if pair[0] == pair[1]:
        return {Batch(max(1, max_tokens // length), length, length)}
    import numpy
    from fairseq.data.data_utils import batch_by_size
    from fairseq.data.indexed_dataset import make_dataset

    paths = [str(folder / f"train.{pair[0]}-{pair[1]}.{language}") for language in pair]
    # Copied while the datasets are there: with them goes the file that their sizes are read from.
    data = [make_dataset(path, "mmap") for path in paths]
    source, target = (numpy.array(each.sizes, dtype=numpy.int64) for each in data)
    # As fairseq sorts: by the source's length, and where that is the same by the target's. A pair that fits no batch it
    # skips, or ends over.
    longer = numpy.maximum(source, target)
    order = numpy.lexsort((target, source)).astype(numpy.int64)
    order = order[longer[order] <= max_tokens]
    found = batch_by_size(order, longer.__getitem__, longer[order], max_tokens, required_batch_size_multiple=1)
    return {Batch(len(rows), int(source[rows].max()), int(target[rows].max())) for rows in found}
