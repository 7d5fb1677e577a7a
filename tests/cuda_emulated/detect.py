"""Runs each operation of wrong.py on the emulated device, in a step, and prints as JSON what was recorded:

python -m tests.cuda_emulated.detect
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from tests.cuda_emulated import library

    library.load()
    from tests.cuda_emulated import answers

    answers.install()
    from tests.cuda_emulated import wrong

    tensors = wrong.make_tensors()
    operations = dict(wrong.RIGHT)
    for some in wrong.WRONG.values():
        operations |= some
    events = {name: record(operation, tensors) for name, operation in operations.items()}
    counted = (wrong.views, wrong.a_product_and_its_gradient, wrong.a_compiled_function, wrong.attention)
    print(json.dumps({"events": events, "launches": {some.__name__: launches(some, tensors) for some in counted}}))


def record(operation: Any, tensors: Any) -> list[dict[str, Any]]:
    """Run one operation, and return what was recorded."""
    from tests.cuda_emulated.record import RECORDER

    RECORDER.clear()
    RECORDER.is_in_step = True
    error = ""
    try:
        operation(tensors)
    except RuntimeError as raised:
        error = str(raised)
    return [vars(event) | {"count": count, "error": error} for event, count in RECORDER.events.items()]


def launches(operation: Any, tensors: Any) -> dict[str, int]:
    from tests.cuda_emulated.record import RECORDER

    tensors.weight.grad = None
    record(operation, tensors)
    return dict(RECORDER.launches)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without ending torch's threads, which rarely aborts while the library is unloaded
