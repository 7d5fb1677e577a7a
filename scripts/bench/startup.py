"""Measure the startup time of commands such as `swiftlite --help`, relative to `python -c "import torch"`.

    python scripts/bench/startup.py [--runs 15]

Prints one line per figure: name, median seconds, ratio to importing torch, and whether the target (0.3x) is met. The
exit code is 1 if the target is missed.
"""

import argparse
import statistics
import subprocess
import sys

from contest import timed

TARGET = 0.3
COMMANDS = {
    "swiftlite --help": ["-m", "swiftlite", "--help"],
    "swiftlite megatron sft --help": ["-m", "swiftlite", "megatron", "sft", "--help"],
    "swiftlite export --help": ["-m", "swiftlite", "export", "--help"],
    "swiftlite infer --help": ["-m", "swiftlite", "infer", "--help"],
    "swiftlite doctor --help": ["-m", "swiftlite", "doctor", "--help"],
    "swiftlite megatron sft --lerning_rate 1": ["-m", "swiftlite", "megatron", "sft", "--lerning_rate", "1"],
}
BASELINES = {"python -c 'import torch'": ["-c", "import torch"], "python -c pass": ["-c", "pass"]}


def seconds(arguments: list[str]) -> float:
    """Return the wall-clock time of one Python process in seconds."""
    return timed(lambda: subprocess.run([sys.executable, *arguments], capture_output=True, check=False))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    every = COMMANDS | BASELINES
    for arguments in every.values():
        seconds(arguments)  # fills the file cache
    # Interleaved, so that a temporarily slow machine affects all commands.
    rounds = [{name: seconds(arguments) for name, arguments in every.items()} for _ in range(runs)]
    medians = {name: statistics.median(one[name] for one in rounds) for name in every}
    torch = medians["python -c 'import torch'"]
    width = max(map(len, every))
    for name, median in medians.items():
        verdict = ""
        if name in COMMANDS:
            verdict = "ok"
            if median >= TARGET * torch:
                verdict = f"over the target of {TARGET}x"
        print(f"{name:<{width}}  {median:7.3f} s  {median / torch:6.3f}x  {verdict}".rstrip())
    return int(any(medians[name] >= TARGET * torch for name in COMMANDS))


if __name__ == "__main__":
    sys.exit(main())
