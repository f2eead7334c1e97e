"""The command `fairseq-admin`: what a checkpoint's ω are, and the average of a run's last checkpoints."""

import argparse
import json
import sys
from pathlib import Path
from typing import List, Optional

from . import __version__, checkpoint, provenance
from .errors import AdminError
from .omega import omega_summary


def _omega(args: argparse.Namespace) -> None:
    model = checkpoint.read(args.checkpoint)["model"]
    stacks = checkpoint.omegas(model)
    if not stacks:
        raise AdminError(f"{args.checkpoint} has no omega: it is not (or no longer) an Admin model.")
    record = provenance.decode(model[provenance.KEY])
    if args.json:
        table = {
            stack: [
                {"layer": int(name.split(".")[1]), "sublayer": name.split(".")[2], **omega_summary(omega)}
                for name, omega in sublayers.items()
            ]
            for stack, sublayers in stacks.items()
        }
        print(json.dumps({**table, "provenance": record}, indent=1))
        return
    print("profiled: " + (", ".join(f"{k} {v}" for k, v in record.items()) if record else "not yet"))
    print(f"{'stack':8} {'sub-layer':>9} {'layer':>5}  {'kind':12} {'min':>9} {'mean':>9} {'max':>9}")
    for stack, sublayers in stacks.items():
        for number, (name, omega) in enumerate(sublayers.items(), 1):
            _, layer, kind = name.split(".")
            s = omega_summary(omega)
            print(f"{stack:8} {number:9d} {layer:>5}  {kind:12} {s['min']:9.4f} {s['mean']:9.4f} {s['max']:9.4f}")


def _average(args: argparse.Namespace) -> None:
    paths: List[Path] = args.inputs
    if len(paths) == 1 and paths[0].is_dir():
        paths = checkpoint.newest(paths[0], args.last)
    if args.output.resolve() in [path.resolve() for path in paths]:
        raise AdminError(f"{args.output} is one of the checkpoints to average; give another --output.")
    checkpoint.write(checkpoint.average(paths), args.output)
    print(f"{args.output}: average of {', '.join(path.name for path in paths)}")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: at least 1 is needed")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line, one sub-command a verb."""
    top = argparse.ArgumentParser(prog="fairseq-admin", description=__doc__)
    top.add_argument("--version", action="version", version=__version__)
    verbs = top.add_subparsers(dest="verb", required=True)
    omega = verbs.add_parser("omega", help="print omega of every sub-layer, and where it came from")
    omega.add_argument("checkpoint", type=Path, help="a checkpoint of transformer_admin")
    omega.add_argument("--json", action="store_true", help="for machines: min, mean and max over channels")
    omega.set_defaults(run=_omega)
    average = verbs.add_parser("average", help="average checkpoints into one")
    average.add_argument("inputs", type=Path, nargs="+", help="checkpoints, or one run folder")
    average.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    average.add_argument("--last", type=_positive, default=10, help="of a run folder, how many (default: 10)")
    average.set_defaults(run=_average)
    return top


def main(arguments: Optional[List[str]] = None) -> int:
    """Run one command; a user's mistake is one line on standard error and status 2."""
    args = parser().parse_args(arguments)
    try:
        args.run(args)
    except AdminError as error:
        print(f"fairseq-admin: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
