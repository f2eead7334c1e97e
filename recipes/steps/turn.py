"""Run a command once no other runs that was given the same file to lock.

    python3 recipes/steps/turn.py .venv/lock make .venv/ready

For what there is no environment for yet: of Python's own library alone (guard.py does more, with filelock).
"""

from __future__ import annotations

import fcntl
import os
import sys


def main() -> None:
    path, *command = sys.argv[1:]
    os.makedirs(os.path.dirname(path), exist_ok=True)
    lock = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"Another process has {path}. Waiting for its end.", file=sys.stderr)
        fcntl.flock(lock, fcntl.LOCK_EX)
    os.set_inheritable(lock, True)  # held until the command, which takes this process over, has ended
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
