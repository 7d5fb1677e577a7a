"""Run a server for `bench`, and stop it when `bench` ends, even if `bench` is killed.

    python -m swiftlite.engines.server.watchdog PROCESS_ID_OF_BENCH COMMAND ...

This process is the leader of a session, so that the server and all its subprocesses can be killed as one group.
"""

import os
import signal
import subprocess
import sys

from swiftlite.runtime.parent import exit_with_parent


def main(parent: int, words: list[str]) -> int:
    """Run a command and return its exit code.

    Args:
        parent: process id of `bench`, which started this process in a separate session.
    """
    servers: list[subprocess.Popen] = []

    def stop(number: int, frame: object) -> None:
        if os.getppid() != parent:  # `bench` has ended
            os.killpg(0, signal.SIGKILL)
        for server in servers:
            server.terminate()

    signal.signal(signal.SIGTERM, stop)
    exit_with_parent(parent, signal.SIGTERM)
    servers.append(subprocess.Popen(words))
    code = servers[0].wait()
    if code < 0:  # a signal
        return 128 - code
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
