"""`python -m meshlib`: commands over the library.

python -m meshlib validate [--file published_results.json] [--refit]    predicted beside published, with errors
python -m meshlib validate --talks                                      the figures of the talks about images
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from meshlib.errors import GraphError, MeshlibError
from meshlib.validation.talks import talks
from meshlib.validation.validating import validate as run


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 2 for wrong arguments or files."""
    parser = argparse.ArgumentParser(prog="python -m meshlib", description="Plan and price programs on TPU meshes.")
    commands = parser.add_subparsers(dest="command", required=True)
    validate = commands.add_parser("validate", help="predicted beside published, with the error of each row")
    validate.add_argument("--file", help="JSON in the format of published results; default: the set in the package")
    validate.add_argument("--refit", action="store_true", help="fit the constants to the training runs first")
    validate.add_argument("--talks", action="store_true", help="the figures of the talks, in place of the rows")
    args = parser.parse_args(argv)
    try:
        if args.talks and (args.file or args.refit):
            raise GraphError("validate: --talks has facts of its own; leave out --file and --refit")
        print(talks() if args.talks else run(args.file, args.refit))
    except MeshlibError as fault:
        print(f"meshlib: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
