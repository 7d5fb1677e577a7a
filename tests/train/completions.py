"""Make stored completions, and run steps of `megatron grpo` on them in this process."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from swiftlite.args.commands import ExportArgs, GrpoArgs, SftArgs
from swiftlite.data.packing.sampler import Sampler
from swiftlite.data.sample import Sample
from swiftlite.export.run import convert
from swiftlite.families.index import image_sizes
from swiftlite.rollouts.generation import Generation, image_files
from swiftlite.runtime.mesh import Mesh
from swiftlite.train import phases
from swiftlite.train import run as training
from tests.parallel.parity import save_gradients
from tests.tiny import make_tiny_hf
from tests.train.pairs import open_hf
from tests.train.prepared import prepare
from tests.untimed import untimed

NUM_PROMPTS, NUM_GENERATIONS = 6, 4


def write_prompts(path: Path) -> Path:
    rows = [{"query": f"What is {n} plus {n}?{' Please.' * (n % 3)}", "answer": str(2 * n)} for n in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


USUAL: dict[str, Any] = {
    "split_dataset_ratio": 0.0,
    "torch_dtype": "float32",
    "micro_batch_size": 3,
    "global_batch_size": 12,
    "max_completion_length": 12,
    "max_length": 128,
    "train_iters": 1,
    "lr": 1e-3,
    "acceptance_samples": 0,
    "report_to": [],
    "clip_grad": 0.0,
}
"""Options of a run of one step on completions."""


def policy_options(model: Path, directory: Path) -> Callable[..., GrpoArgs]:
    """Return a function that returns the options of a run of one step, some of them replaced."""
    usual: dict[str, Any] = USUAL | {
        "model": str(model),
        "dataset": [str(write_prompts(directory / "prompts.jsonl"))],
        "output_dir": str(directory / "run"),
        "num_generations": NUM_GENERATIONS,
    }
    return lambda **changed: GrpoArgs(**usual | changed)


def store(args: GrpoArgs, mesh: Mesh, directory: Path, number: int = 0, *, has_tools: bool = False) -> Generation:
    """Write a generation of random completions, with log-probabilities near those of a random model.

    Args:
        has_tools: whether about half of the tokens after the first one of a completion are those of tools.
    """
    run = prepare(args, mesh)
    vocab_size = run.hf_model.config["vocab_size"]
    sizes = image_sizes(run.hf_model.config)  # transformers takes placeholders in completions for those of images
    random = np.random.RandomState(number)
    per_generation = args.global_batch_size * args.steps_per_generation // args.num_generations
    sampler = Sampler(len(run.data.train), per_generation, args.seed, args.dataset_shuffle)
    prompts = []
    for index in sampler.global_batch(number):
        prompts += [run.data.train[index]] * args.num_generations
    lengths = random.randint(1, args.max_completion_length + 1, len(prompts)).astype(np.int32)
    num_tokens = int(lengths.sum())
    near = -np.log(vocab_size)

    is_generated = np.ones(num_tokens, bool)
    if has_tools:
        is_generated = random.rand(num_tokens) < 0.5
        is_generated[np.cumsum([0, *lengths[:-1]])] = True

    def log_p() -> np.ndarray:
        values = near + 0.3 * random.randn(num_tokens)
        return np.where(is_generated, values, np.nan).astype(np.float32)

    names = ("temperature", "max_completion_length", "num_generations")
    generation = Generation(
        prompt_ids=np.concatenate([prompt.input_ids for prompt in prompts]),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], np.int32),
        completion_ids=random.randint(0, vocab_size if sizes is None else sizes.vision_start_id, num_tokens, np.int32),
        completion_lengths=lengths,
        is_truncated=lengths == args.max_completion_length,
        scores=random.rand(len(prompts), 1).astype(np.float32),
        advantages=random.randn(len(prompts)).astype(np.float32),
        engine_log_p=log_p(),
        old_log_p=log_p(),
        reference_log_p=log_p(),
        teacher_log_p=log_p(),
        draft_depths=np.full(num_tokens, -1, np.int8),
        is_generated=is_generated,
        figures={"reward": 0.5},
        settings={name: getattr(args, name) for name in names} | {"reference": args.model},
        images=image_files(prompts),
    )
    directory.mkdir(exist_ok=True)
    generation.save(directory / f"{number:06d}.safetensors")
    return generation


def log_p_of(hf_model: Any, generation: Generation, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-probabilities of all tokens of completions under a transformers model, [C]."""
    found = []
    for sample in generation.samples():
        ids = torch.from_numpy(sample.input_ids).long()
        log_p = (hf_model(ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        is_completion = torch.from_numpy(sample.loss_scale[1:] > 0)
        found.append(log_p[:-1].gather(1, ids[1:, None])[:, 0][is_completion])
    return torch.cat(found)


def hf_log_p(directory: Path, generation: Generation, temperature: float = 1.0) -> np.ndarray:
    """Return `log_p_of` for the model in a directory."""
    with torch.no_grad():
        return log_p_of(open_hf(directory), generation, temperature).numpy()


def make_teacher(directory: Path, **sizes: Any) -> Path:
    """Write a model without heads that is wider and deeper than those of the tests."""
    larger: dict[str, Any] = sizes | {"hidden_size": 96, "num_hidden_layers": 6}
    return make_tiny_hf(directory, "qwen3", depth=0, seed=1, with_tokenizer=True, **larger)


def first_step(
    args: SftArgs, mesh: Mesh, samples: Sequence[Sample] = ()
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return metrics and gradients (by HF name) of one step.

    Args:
        samples: what is trained on instead of the completions of the run.
    """
    run = prepare(args, mesh)
    run.output_dir.mkdir(exist_ok=True)
    trainer = training.make_trainer(run, phases.state_of(run))
    if samples:
        batches = run.batches.global_batch(run.batches.rows(samples), np.arange(len(samples)))
        trainer.batches = replace(trainer.batches, get=lambda step: batches)
    metrics = trainer.step(1)
    trainer.batches.release()
    out_dir, hf_model = Path(args.output_dir) / "gradients", run.hf_model
    save_gradients(run.train_state.wrapped, run.train_state.chunks, out_dir, hf_model.family, hf_model.config)
    return metrics, load_file(out_dir / "model.safetensors")


def train(args: SftArgs, mesh: Mesh) -> Path:
    """Run all phases in order; return the run's directory."""
    run = prepare(args, mesh)
    state = phases.restore(run)
    trainer = training.make_trainer(run, state)
    try:
        trainer.fit(state.step)
    finally:
        trainer.batches.release()
    trainer.close()
    return run.output_dir


def train_and_stop(args: SftArgs, mesh: Mesh, stop: int) -> Path:
    """Run phases until the generation of the second step after step `stop` is written, but not trained on."""
    run = prepare(args, mesh)
    state = phases.restore(run)
    trainer = training.make_trainer(run, state)

    class Killed(Exception):
        pass

    step_of = trainer.step

    def step(number: int) -> dict[str, float]:
        if number == stop + 2:
            trainer.batches.get(number - 1)
            raise Killed
        return step_of(number)

    trainer.step = step  # type: ignore[method-assign]
    try:
        trainer.fit(state.step)
    except Killed:
        pass
    else:
        raise AssertionError("the run has too few steps")
    finally:
        trainer.batches.release()
    trainer.close()
    return run.output_dir


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the metrics of each step, without speeds and sizes."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [untimed(line) for line in lines]


def weights(run: Path, mesh: Mesh) -> dict[str, torch.Tensor]:
    """Return the exported tensors of a run."""
    out = run.with_name(f"{run.name}-hf")
    convert(ExportArgs(model=str(run), output_dir=str(out), to_hf=True), mesh)
    return load_file(out / "model.safetensors")
