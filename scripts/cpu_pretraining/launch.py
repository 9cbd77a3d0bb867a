"""`python -m scripts.cpu_pretraining.launch OPTIONS`: torchrun with as many ranks as needed.

Same as `torchrun --nproc_per_node N -m scripts.cpu_pretraining OPTIONS` on one machine, but for two
things: a mistake in the options is answered before any rank starts, and the exit code is that of
the run (130 after Ctrl-C), without the traceback that torchrun adds to a job that ended early.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from .arguments import parse_arguments
from .interrupt import exit_code
from .usage_error import UsageError, exit_with_usage_error

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Start the ranks, wait for them, and return the exit code of the run."""
    try:
        args = parse_arguments(argv, world_size=None)
    except UsageError as error:
        exit_with_usage_error(error)
    # All ranks are on this machine: talk over loopback, whatever its host name resolves to.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    ranks = args.tensor_model_parallel_size * args.context_parallel_size * args.data_parallel_size
    try:
        torchrun(
            [
                *("--nnodes", "1", "--nproc_per_node", str(ranks)),
                *("--rdzv_backend", "c10d", "--rdzv_endpoint", "127.0.0.1:0"),
                *("--local_addr", "127.0.0.1"),
                *("-m", "scripts.cpu_pretraining", *argv),
            ]
        )
    except SignalException as stopped:
        return exit_code(stopped.sigval)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        said = f"rank {rank} ended with exit code {failure.exitcode}; its own message is above"
        if isinstance(failure.message, dict):  # what the rank left, see usage_error
            said = f"error: {failure.message['message']}"
        print(f"cpu_pretraining: {said}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else exit_code(-failure.exitcode)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
