"""`python -m scripts.cpu_pretraining.processes OPTIONS`: how many processes these options need.

For the launcher: a mistake in the options is answered here, before torchrun, which would wrap it
in the traceback of a failed job.
"""

from __future__ import annotations

import sys

from .arguments import parse_arguments
from .usage_error import UsageError, exit_with_usage_error


def main() -> None:
    """Print TP * DP, or the mistake, with exit code 2."""
    try:
        args = parse_arguments(sys.argv[1:], world_size=None)
    except UsageError as error:
        exit_with_usage_error(error)
    print(args.tensor_model_parallel_size * args.data_parallel_size)


if __name__ == "__main__":
    main()
