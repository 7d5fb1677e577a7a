"""Record what an emulated run does that would be slow or an error on a GPU, and which line of code causes it."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "swiftlite") + "/"
TESTS = str(ROOT / "tests" / "cuda_emulated" / "wrong.py")
UPSTREAM = "/megatron/core/"

Kind = Literal["mixed", "generator", "wait", "unpinned", "float64"]


@dataclass(frozen=True)
class Event:
    """An operation that would be slow or an error on a GPU.

    Attributes:
        operation: name of the operation in torch.
        region: part of a step: "layer" (forward pass of a layer), "model" (the rest of the model's forward pass),
            "backward", "border" (before and after both passes); "" outside of steps.
        line: the innermost line of swiftlite on the stack and the line of megatron-core that it called, if any. In a
            backward pass, the line that created the node of the graph.
    """

    kind: Kind
    operation: str
    region: str
    line: str


@dataclass
class Recorder:
    """Everything that was recorded since the last call of `clear`.

    Attributes:
        steps: number of optimizer steps.
        borders: number of launches in the region "border", by step.
        micro_batches: number of forward passes of a model inside of steps.
        launches: number of operations that would be kernels, by region.
        kernels: the same by operation, without the region "border".
    """

    events: Counter[Event] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    borders: list[int] = field(default_factory=list)
    steps: int = 0
    micro_batches: int = 0
    is_in_step: bool = False
    layers: int = 0
    models: int = 0
    silent: int = 0

    def clear(self) -> None:
        self.__init__()

    @property
    def region(self) -> str:
        if not self.is_in_step:
            return ""
        # Backward passes run in a thread of autograd's; what is recomputed there is part of them.
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        if self.layers:
            return "layer"
        return "model" if self.models else "border"

    def note(self, kind: Kind, operation: str) -> Event:
        event = Event(kind, operation, self.region, asking_line())
        self.events[event] += 1
        return event

    def launch(self, operation: str) -> None:
        if self.is_in_step and not self.silent:
            region = self.region
            self.launches[region] += 1
            if region != "border":
                self.kernels[operation] += 1

    @contextmanager
    def one_kernel(self, name: str) -> Iterator[None]:
        """Count all operations inside this context as one launch."""
        self.launch(name)
        self.silent += 1
        try:
            yield
        finally:
            self.silent -= 1


RECORDER = Recorder()


def asking_line() -> str:
    """Return the line of swiftlite that is running, as in `Event.line`."""
    node: Any = torch._C._current_autograd_node()
    lines = [] if node is None else node.metadata.get("traceback_", [])
    here = lines_of_ours(sys._getframe(1))
    if here:
        return here
    made_at = lines[0] if lines else "an unknown line"
    return f"{made_at}, in the backward pass ({node.name()})" if node else "no line of ours"


def lines_of_ours(frame: FrameType | None) -> str:
    """Return the lines of a stack, such as `swiftlite/a.py:12` or `swiftlite/a.py:12 > megatron/core/b.py:34`.

    Return "" if no line of swiftlite is on the stack.
    """
    upstream = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE) or path == TESTS:
            ours = f"{path.removeprefix(str(ROOT) + '/')}:{frame.f_lineno}"
            return f"{ours} > {upstream}" if upstream else ours
        if not upstream and UPSTREAM in path:
            upstream = f"megatron/core/{path.split(UPSTREAM)[1]}:{frame.f_lineno}"
        frame = frame.f_back
    return upstream


def stack_for_autograd(*options: object) -> list[str]:
    """Replace `torch.fx.traceback.format_stack`, which autograd calls for every node of a graph in anomaly mode.

    This replacement returns only one line of the stack, which is a hundred times faster.
    """
    return [lines_of_ours(sys._getframe(1)) or "an unknown line"]
