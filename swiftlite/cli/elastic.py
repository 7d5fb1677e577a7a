"""torchrun, with the ranks' exit code as its own and no report over the ranks' own messages. Started by `launch.py`.

Not a replacement: the arguments are torchrun's, the agent is torchrun's. The only file of `cli` that imports torch.
"""

import logging
import os
import signal
import sys
import tempfile

# Seconds that ranks have to save a checkpoint after SIGTERM or Ctrl-C before torchrun kills them; its default is 30.
SHUTDOWN_SECONDS = 600


def main(argv: list[str]) -> int:
    """Run torchrun with `argv`; returns the exit code of the rank that failed first, 128 + N for signal N, or 0."""
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # They would list who got which signal, between the failed rank's own words and our one line about it.
    for name in ("multiprocessing.api", "agent.server.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="swiftlite_") as directory:
        os.environ["SWIFTLITE_TOLD_DIR"] = directory
        try:
            run.run(run.parse_args(["--log-dir", directory, *argv]))
            return 0
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
            how = f"exit code {code}" if failure.exitcode > 0 else f"signal {signal.Signals(-failure.exitcode).name}"
            print(f"swiftlite: rank {rank} ended first, with {how}; the others were stopped", file=sys.stderr)
            return code
        except SignalException as error:
            return 128 + error.sigval  # the agent has forwarded it and waited for the ranks


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
