"""Record what the program decided after a fault, for the person who reads about it later.

Each decision is a line of metrics.jsonl, and a row of a table on the run's report page:

    {"step": 7, "fault": "bad_step", "decision": "skipped: gradient norm nan", "rows": [12, 40]}

Restarts by the launcher have lines of a different form, see `report/metrics.py`. This module does not import torch.
"""

import json
from pathlib import Path
from typing import Any

from swiftlite.base.log import logger

METRICS_FILE = "metrics.jsonl"
DECISION = "decision"
"""Key of the decision's text in a line of metrics.jsonl."""


def record_decision(run: Path, step: int, fault: str, decision: str, **details: Any) -> None:
    """Append a decision to the run's metrics.jsonl, and log it as a warning. Called on the first rank only.

    Args:
        run: the run's directory. It is created if it does not exist.
        step: number of the step that the decision is about, or of the last completed step. A run that resumes from an
            earlier step removes the line, because it repeats this step.
        fault: the kind of fault in one word, such as "damaged_checkpoint".
        decision: what was decided and why, in a few words.
        details: further values for JSON, such as what the fault cost ("lost_seconds", "lost_steps").
    """
    logger.warning("%s: %s", fault, decision)
    line = json.dumps({"step": step, "fault": fault, DECISION: decision, **details})
    try:
        run.mkdir(parents=True, exist_ok=True)
        with (run / METRICS_FILE).open("a") as file:
            file.write(line + "\n")
    except OSError as error:  # a full disk; the next checkpoint reports it
        logger.warning("%s cannot be written: %s", run / METRICS_FILE, error.strerror)
