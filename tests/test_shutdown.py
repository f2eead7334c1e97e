"""A process that stops within an epoch ends with its own status, whatever fairseq's batch thread is doing."""

from __future__ import annotations

from conftest import python

from fairseq_admin.errors import DIVERGED

# Each child has a thread that makes endless batches in C++. It ends after the first batch: normally, or because
# training diverges.
CHILDREN = """
import os, sys, torch
import fairseq_admin.plugin
from fairseq.data.iterators import BufferedIterator
torch.set_num_threads(1)
class Batches:
    def __iter__(self):
        while True:
            yield torch.randn(300, 300).sort()[0]
    def __len__(self):
        return 10**6
def train(well):
    batch = next(iter(BufferedIterator(10, Batches())))
    if well:
        sys.exit(5)
    raise FloatingPointError("gradients are Nan/Inf")  # which keeps the batch
for well in (True, False):
    child = os.fork()
    if not child:
        train(well)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_process_ends_with_its_own_status() -> None:
    """Each child ends with its own status. Without the plugin: -6, "terminate called without an active exception"."""
    result = python(CHILDREN)
    assert [int(status) for status in result.stdout.split()] == [5, DIVERGED], result.stderr
