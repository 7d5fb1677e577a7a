"""Make a student and a teacher, rows with answers, and stored completions for `megatron gkd`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from swiftlite.args.commands import GkdArgs
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample
from swiftlite.plan.distillation import is_on_policy
from swiftlite.rollouts.distillation import prompt_of
from swiftlite.rollouts.generation import Generation
from swiftlite.runtime.mesh import Mesh
from tests.tiny import make_tiny_hf
from tests.train.completions import USUAL, make_teacher
from tests.train.prepared import prepare

NUM_ROWS = 24


def make_models(directory: Path, depth: int = 1, family: str = "qwen3", **sizes: Any) -> tuple[Path, Path]:
    """Write a student with `depth` heads, and a teacher that is wider and deeper."""
    student = make_tiny_hf(directory / "student", family, depth=depth, with_tokenizer=True, **sizes)
    return student, make_teacher(directory / "teacher", **sizes)


def write_rows(path: Path) -> Path:
    rows = [
        {"query": f"What is {n} plus {n}?{' Please.' * (n % 3)}", "response": f"It is {2 * n}{' exactly' * (n % 4)}."}
        for n in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gkd_options(models: tuple[Path, Path], directory: Path) -> Callable[..., GkdArgs]:
    """Return a function that returns the options of a run of one step, some of them replaced."""
    student, teacher = map(str, models)
    usual: dict[str, Any] = USUAL | {
        "model": student,
        "teacher_model": teacher,
        "dataset": [str(write_rows(directory / "rows.jsonl"))],
        "output_dir": str(directory / "run"),
    }
    return lambda **changed: GkdArgs(**usual | changed)


def rows_of_step(args: GkdArgs, mesh: Mesh, step: int) -> list[Sample]:
    """Return the rows of a step."""
    train = prepare(args, mesh).data.train
    sampler = Sampler(len(train), args.global_batch_size, args.seed, args.dataset_shuffle)
    return [train[index] for index in sampler.global_batch(step)]


def samples_of_step(args: GkdArgs, mesh: Mesh, step: int) -> list[Sample]:
    """Return what a step trains on: stored completions, or its rows."""
    if not is_on_policy(args, step):
        return rows_of_step(args, mesh, step)
    return Generation.load(Path(args.rollouts_from or "") / f"{step:06d}.safetensors").samples()


def store(args: GkdArgs, mesh: Mesh, directory: Path, step: int) -> None:
    """Write random completions for a step."""
    prompts = [prompt_of(row) for row in rows_of_step(args, mesh, step)]
    random = np.random.RandomState(step)
    lengths = random.randint(1, args.max_completion_length + 1, len(prompts)).astype(np.int32)
    num_tokens = int(lengths.sum())
    unknown = np.full(num_tokens, np.nan, np.float32)
    generation = Generation(
        prompt_ids=np.concatenate([prompt.input_ids for prompt in prompts]),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        # Without the pad token 0, whose embedding gets no gradient in transformers.
        completion_ids=random.randint(1, 100, num_tokens).astype(np.int32),
        completion_lengths=lengths,
        is_truncated=lengths == args.max_completion_length,
        scores=np.zeros((len(prompts), 0), np.float32),
        advantages=np.zeros(len(prompts), np.float32),
        engine_log_p=unknown,
        old_log_p=unknown,
        reference_log_p=unknown,
        teacher_log_p=unknown,
        draft_depths=np.full(len(unknown), -1, np.int8),
        is_generated=np.ones(num_tokens, bool),
        settings={name: getattr(args, name) for name in ("temperature", "max_completion_length")},
    )
    directory.mkdir(exist_ok=True)
    generation.save(directory / f"{step:06d}.safetensors")
