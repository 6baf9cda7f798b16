"""Entry point of ``python -m dwtir``: a first look at the kernels, and ``doctor``."""

import sys

from . import doctor, first_look

_USAGE = """usage: python -m dwtir [--target TARGET]     build, check and time the articles' layers
       python -m dwtir doctor [options]      say what this machine has and lacks"""


def main(arguments: list[str]) -> int:
    """Run a command; return the process's exit status."""
    match arguments:
        case ["doctor", *rest]:
            return doctor.main(rest)
        case []:
            return first_look.main(None)
        case ["--target", target]:
            return first_look.main(target)
        case ["-h" | "--help"]:
            print(_USAGE)
            return 0
        case _:
            print(_USAGE, file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
