"""Count the accepted drafts of an export and of its baseline in an engine (`export --infer_backend`)."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from swiftlite.acceptance.report import ACCEPTANCE_FILE
from swiftlite.args.commands import ExportArgs
from swiftlite.base.errors import UserError
from swiftlite.base.log import logger
from swiftlite.runtime.parent import exit_with_parent


def count_in_engine(args: ExportArgs, hf_dir: Path, baseline: Path, torch_dtype: str) -> None:
    """Run `swiftlite evaluate` with the engine on the export and its baseline, and add the counts to acceptance.json
    of the export. The command is a separate process, because an engine cannot start inside the session of an export.

    Raises:
        UserError: the command failed.
    """
    words = ["evaluate", "--model", str(hf_dir), "--baseline", str(baseline), "--torch_dtype", torch_dtype]
    words += ["--infer_backend", args.infer_backend, "--acceptance_json", str(hf_dir / ACCEPTANCE_FILE)]
    words += ["--dataset", *args.val_dataset]
    for name in ("media_root", "max_pixels", "min_pixels"):
        if vars(args)[name] is not None:
            words += [f"--{name}", str(vars(args)[name])]
    stops_with_parent = partial(exit_with_parent, os.getpid(), signal.SIGTERM)
    with tempfile.TemporaryDirectory() as pages:
        command = [*words, "--output_dir", pages]
        logger.info("$ swiftlite %s", shlex.join(command))
        process = subprocess.Popen([sys.executable, "-m", "swiftlite", *command], preexec_fn=stops_with_parent)
        try:
            code = process.wait()
        except BaseException:  # a signal; after Ctrl-C the command has received it as well
            process.terminate()
            process.wait()
            raise
    if code:
        problem = f"--infer_backend {args.infer_backend}: swiftlite evaluate failed with exit code {code}"
        raise UserError(problem, "nothing was written; fix the cause above, or remove --infer_backend")
