"""Find and run lm-evaluation-harness, which `evaluate --tasks` starts as a separate process.

It requires other releases of some packages than swiftlite, so it has a separate environment. It reads and judges tasks,
and sends their prompts to a server. This module does not import torch.
"""

from importlib.metadata import version
from pathlib import Path

from swiftlite.runtime.separate import Ended, SeparateEnvironment, run_separately

RELEASE = "0.4.13"
LM_EVAL = SeparateEnvironment("lm_eval", "SWIFTLITE_LM_EVAL_VENV")
_MARKS = ("%|", "WARNING", "ERROR")


def install_command() -> str:
    """Return the shell command that creates the environment, with the tokenizers of this environment."""
    return LM_EVAL.install_command([f"lm_eval[api,ifeval]=={RELEASE}", f"transformers=={version('transformers')}"])


def run(words: list[str], directory: Path, variables: dict[str, str]) -> Ended:
    """Run a command of lm-eval, print its progress and warnings, and return how it ended.

    Args:
        words: command and options, such as ["run", "--config", FILE].
        directory: current directory, to which paths in task files are relative. Modules are not imported from it.
        variables: additional environment variables.
    """
    settings = {"LMEVAL_LOG_LEVEL": "WARNING", "TRANSFORMERS_VERBOSITY": "error"}
    command = [str(LM_EVAL.interpreter), "-I", "-m", "lm_eval", *words]
    return run_separately(command, "lm-eval", settings | variables, is_shown=_is_shown, directory=directory)


def _is_shown(line: str) -> bool:
    """Return whether a line is about progress or a warning; lm-eval also prints its options and a table."""
    return any(mark in line for mark in _MARKS)
