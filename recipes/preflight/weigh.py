"""fairseq-train in this process, with the memory it took written down.

    python -m recipes.preflight.weigh weight.json data-bin --user-dir fairseq_admin --arch transformer_admin_18l ...

fairseq-train's options follow. The file says how far this process's own memory grew, from when torch and
fairseq were imported to its peak, in bytes.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from recipes.steps.common import write_lines

STATUS = Path("/proc/self/status")


def own_memory(name: str) -> int:
    """VmRSS or VmHWM (the peak of it) of this process in bytes; 0 where there is no /proc."""
    found = re.search(rf"{name}:\s+(\d+) kB", STATUS.read_text()) if STATUS.exists() else None
    return int(found[1]) * 1024 if found else 0


def main() -> None:
    import torch._dynamo  # noqa: F401  (the optimizer's first step imports it)

    from recipes.steps import train

    path = Path(sys.argv.pop(1))
    before = own_memory("VmRSS")
    try:
        train.main()
    finally:
        write_lines(path, [json.dumps({"growth": own_memory("VmHWM") - before})])


if __name__ == "__main__":
    main()
