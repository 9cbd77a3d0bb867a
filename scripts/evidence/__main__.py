"""``python -m scripts.evidence NAME [options]``: makes the tables and pictures of the docs."""

from __future__ import annotations

import sys
from importlib import import_module

_TOOLS = {
    "layers": "a layer in every form, simulated: who is ahead where?",
    "steps": "steps that others measured on NPUs, beside the simulated ones",
    "pictures": "the pictures of the README, simulated",
}


def main(words: list[str]) -> int:
    """Run the named tool with the remaining words; returns its exit code."""
    if words[:1] and words[0] in _TOOLS:
        sys.argv[0] = f"python -m scripts.evidence {words[0]}"  # what its --help calls it
        return int(import_module(f"scripts.evidence.{words[0]}").main(words[1:]))
    print(__doc__)
    print(*(f"  {name:<15} {purpose}" for name, purpose in _TOOLS.items()), sep="\n")
    if words[:1] in ([], ["-h"], ["--help"]):
        return 0
    print(f"error: {words[0]} is not one of them", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
