"""``python -m cuattn.abi``: write ``kernels_cu/base/abi.cuh``, or check that it is current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cuattn.abi.emit import header

PATH = Path(__file__).resolve().parents[2] / "kernels_cu" / "base" / "abi.cuh"


def main(arguments: list[str] | None = None) -> int:
    """Return 1 where ``--check`` finds a stale header, else 0."""
    parser = argparse.ArgumentParser(prog="python -m cuattn.abi", description=__doc__)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--check", action="store_true", help="fail when the header is stale")
    mode.add_argument("--write", action="store_true", help="write the header")
    if parser.parse_args(arguments).write:
        PATH.write_text(header(), encoding="utf-8", newline="\n")
    elif not PATH.exists() or PATH.read_text(encoding="utf-8") != header():
        print(f"{PATH} is stale: run `python -m cuattn.abi --write`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
