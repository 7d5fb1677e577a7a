"""Let SGLang fork the processes of an engine. A start then takes 2.5 s of CPU time; three imports would take 17 s."""

import multiprocessing
import os

from swiftlite.engines.sglang.options import cpu_variables


def install() -> None:
    """Import what an engine's processes need, and let SGLang fork them from this process."""
    os.environ.update(cpu_variables())  # read when SGLang is imported
    # Not the registry of models: it is for the plugin to say what is in it.
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None  # SGLang's choice is "spawn"
