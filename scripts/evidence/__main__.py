"""``python -m scripts.evidence NAME [options]``: what makes the tables of the documentation."""

from __future__ import annotations

import sys
from importlib import import_module

_TOOLS = {
    "faults": "ranks that are killed, slow, cut off or out of step: what every rank reports",
    "fuzz": "random cases of all ops, fused against plain",
    "soak": "a long training with random shapes: does it leak?",
    "gradient_error": "summed gradient buckets against fp64",
    "host_overhead": "what a transfer costs the host",
    "memory": "peak memory of each op beside its plain form",
    "layers": "a layer in every form, simulated: who is ahead where?",
    "predicted": "the benchmark's micro-batches as simulated, beside what it measured",
    "kernels": "GEMMs and a fused kernel as simulated, beside what others measured",
    "paper": "where the simulator reaches the paper's headlines",
    "paper_case": "the paper's own case: its figures beside the simulator's",
    "timeline": "the picture of a linear layer in the README",
    "flow_picture": "the picture of a layer in the README, simulated",
}


def main(words: list[str]) -> int:
    """Run the named tool with the rest of the words; its exit code."""
    if words[:1] and words[0] in _TOOLS:
        sys.argv[0] = f"python -m scripts.evidence {words[0]}"  # what its --help calls it
        # The ranks of faults are made from its package, which must not import the command.
        module = "faults.command" if words[0] == "faults" else words[0]
        return int(import_module(f"scripts.evidence.{module}").main(words[1:]))
    print(__doc__)
    print(*(f"  {name:<15} {what}" for name, what in _TOOLS.items()), sep="\n")
    if words[:1] in ([], ["-h"], ["--help"]):
        return 0
    print(f"error: {words[0]} is not one of them", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
