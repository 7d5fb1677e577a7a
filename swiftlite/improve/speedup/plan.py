"""The commands of `speedup`. A user can run each of them by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swiftlite.args.commands import SpeedupArgs
from swiftlite.base.heads import MTP, kind_of
from swiftlite.engines.index import ENGINES
from swiftlite.engines.llamacpp.info import LLAMACPP
from swiftlite.families.drafters import BLOCKS, DrafterOptions, with_drafter
from swiftlite.families.resolved import HfModel
from swiftlite.hub.model import is_gguf
from swiftlite.improve.resumable import MODEL
from swiftlite.improve.speedup.held_out import NUM_HELD_OUT
from swiftlite.improve.steps import CommandStep, export_step, model_words
from swiftlite.runtime.environment import sees_gpu

DRAFTED = 3
"""Number of draft tokens per step in training. `bench` also measures smaller numbers."""
BLOCK_DRAFTED = 5
"""The same for block drafters, whose further draft tokens cost less."""
CANDIDATE = "dspark"
"""The drafter that `--drafter auto` compares with MTP heads."""
DRAFT_VOCAB = 8192
LR_OF_ROUNDS = "1e-3"
"""Peak learning rate if training starts from the heads of an earlier round; it equals the default for new heads."""
LR_OF_TRAINED_HEADS = "3e-4"
"""Peak learning rate if training starts from the heads of the checkpoint, which a larger rate could damage."""
FEW_PROMPTS = 192
"""Number of prompts up to which new heads are only fitted, because the time is better spent on more answers. With the
answers to 88 prompts, an epoch of a minute left the share of accepted first drafts at 17.5 %. In another measurement,
with the answers to 185 prompts and the fit alone, it was 24.4 % on scripts/results/prompts.jsonl."""
MAX_PROMPT_TOKENS = 64
"""Maximum length of a prompt that the model writes; a longer one ends after a complete sentence. Most have fewer than
40 tokens. With 256, a sixth of the prompts took 40 % of the generated tokens, the last ones in small batches."""
MIN_BENCH_PROMPTS = 16
"""Minimum number of prompts of `bench`; with fewer, the speed varies too much."""
MIN_ACCEPTED = 0.08
"""Minimum share of accepted drafts at a position for which `bench` measures that number of drafts. Another draft costs
about 10 % of the time of a decoding step."""
BENCH_TOKENS = 64
"""Maximum length of an answer in `bench`."""
GGUF_TYPE = "q8_0"
"""Type of the weights with which llama.cpp is compared."""
HELD_OUT = "held_out.jsonl"
ROWS = "rows.jsonl"
"""File of a round with its rows of --dataset."""
ANSWERS = "answers"
"""Directory of a round with the output of `regenerate`."""


def only_fits(rounds: Sequence[int], base: str, drafter: str = MTP) -> bool:
    """Return whether heads are only fitted. For the arguments, see `Commands.training`."""
    return sum(rounds) <= FEW_PROMPTS and not base and drafter == MTP


@dataclass(frozen=True)
class Commands:
    """The swiftlite commands that `speedup` runs for one model.

    Attributes:
        model: the resolved --model.
        directory: --output_dir.
    """

    args: SpeedupArgs
    model: HfModel
    directory: Path

    def answers(self, number: int, prompts: int, num_rows: int, first: int) -> CommandStep:
        """Return the command that writes and answers the prompts of a round.

        Args:
            number: number of the round, from 1.
            num_rows: number of these prompts that are rows of --dataset; the model writes the others.
            first: number of prompts of all previous rounds, which is added to the seed. A prompt is sampled with the
                sum of the seed and its number in the round, so all rounds write different prompts.
        """
        args = self.args
        directory = self.directory / f"round-{number}"
        output = directory / ANSWERS
        words = ["regenerate", *self._model(args.model), "--infer_backend", args.infer_backend]
        if num_rows:
            words += ["--dataset", str(directory / ROWS)]
        if prompts > num_rows:
            words += ["--self_prompts", str(prompts - num_rows)]
            # Prompts with an opening are of more kinds: heads that are fitted to them accept more drafts.
            words += ["--openings", "builtin"]
            words += ["--max_prompt_tokens", str(MAX_PROMPT_TOKENS)]
        words += ["--max_new_tokens", str(args.max_new_tokens), "--max_batch_size", "128"]
        words += ["--seed", str((args.seed + first) % 2**32), *self._system(), "--output_dir", str(output)]
        return CommandStep(f"round-{number}/answers", tuple(words), output / "dataset.jsonl")

    def training(self, rounds: Sequence[int], base: str, name: str = "") -> CommandStep:
        """Return the command that trains heads, or another drafter, on the answers of all rounds so far, and counts the
        accepted drafts on held-out prompts.

        Args:
            rounds: number of prompts of each round so far.
            base: name of the heads to start from: "model" or an earlier round such as "round-1"; empty for new heads.
            name: CANDIDATE, or empty for the drafter of the rounds.
        """
        number, drafter = len(rounds), name or self.drafter
        name = name or f"round-{number}"
        directory = self.directory / name
        output = directory / "run"
        rows = [str(self.directory / f"round-{each}" / "train.jsonl") for each in range(1, number + 1)]
        words = ["megatron", "sft", *self._model(self.path_of(base)), "--dataset", *rows]
        words += ["--val_dataset", str(self.directory / HELD_OUT), "--mtp_mode", "heads_only"]
        words += "--mtp_loss nla --packing true --max_length 1024 --global_batch_size 1".split()
        if not self.args.dataset:
            # The model wrote the prompts as well, so heads also learn from them.
            words += ["--loss_scale", "all"]
        if only_fits(rounds, base, drafter):
            words += ["--train_iters", "0"]
        else:
            words += ["--num_train_epochs", "3", "--cache_trunk_states", str(directory / "states")]
        # The same number of tokens in each round, because `Progress.best` compares rounds.
        words += f"--acceptance_samples {NUM_HELD_OUT} --acceptance_max_new_tokens 32".split()
        words += "--save_steps 100 --save_total_limit 1".split()
        words += self._drafter(drafter)
        if base:
            words += ["--lr", LR_OF_TRAINED_HEADS if base == MODEL else LR_OF_ROUNDS]
        elif self.model.config["vocab_size"] > DRAFT_VOCAB and self._uses_draft_vocab(drafter):
            words += ["--draft_vocab", str(DRAFT_VOCAB)]
        words += ["--resume", "true", "--output_dir", str(output)]
        return CommandStep(f"{name}/training", tuple(words), output / "run_report.json")

    def _uses_draft_vocab(self, drafter: str) -> bool:
        """Return whether the engine uses the draft vocabulary of a drafter."""
        kind = MTP
        if drafter != MTP:
            kind = kind_of(with_drafter(self.model.config, DrafterOptions(drafter)))
        return kind not in ENGINES[self.args.infer_backend].without_draft_vocab

    @property
    def drafter(self) -> str:
        """The value of --drafter for the rounds."""
        return MTP if self.args.drafter == "auto" else self.args.drafter

    def _drafter(self, drafter: str) -> list[str]:
        """Return the options of the training for a drafter."""
        if drafter != MTP:
            is_block = drafter in BLOCKS
            words = ["--drafter", drafter, "--mtp_unroll", str(BLOCK_DRAFTED if is_block else DRAFTED)]
            return words + (["--drafter_layers", "2", "--drafter_anchors", "0.5"] if is_block else [])
        words = []
        if self.model.heads.layers <= 1:
            words += ["--mtp_unroll", str(DRAFTED)]
        engine = ENGINES[self.args.infer_backend]
        if engine.convention_for(self.model.family).drafting != self.model.family.mtp.drafting:
            words += ["--draft_for", engine.name]
        return words

    def export(self, name: str) -> CommandStep:
        """Return the command that exports the heads called `name` together with the model."""
        return export_step(name, self.directory / name)

    def path_of(self, name: str) -> str:
        """Return the directory of the model with the heads called `name`: --model or the export of a round."""
        if name in ("", MODEL):
            return self.args.model
        return str(self.directory / name / "hf")

    def bench(self, name: str, accepted: Sequence[float], rounds: int, seconds: float) -> CommandStep:
        """Return the command that measures the speed of servers of the model with the heads called `name`.

        Args:
            accepted: share of accepted drafts of these heads per position. Numbers of drafts whose last one is rarely
                accepted are not measured.
            rounds: number of times that every prompt is sent.
            seconds: time for the measurements, if the machine is slow.
        """
        args = self.args
        most = max(1, sum(share >= MIN_ACCEPTED for share in accepted))
        output = self.directory / name / "bench"
        words = ["bench", *self._model(self.path_of(name)), "--val_dataset", str(self.directory / HELD_OUT)]
        words += ["--infer_backend", args.infer_backend]
        # On a GPU, vLLM's newer model runner has only one drafter.
        if ENGINES[args.infer_backend].joins_ngrams and not sees_gpu():
            words += ["--speculative", "mtp,ngram"]
            if rounds == 1:
                most = 1  # each number costs the start of a server, and the text drafts further tokens
        words += ["--num_speculative_tokens", *map(str, range(most + 1)), *self._load(), "--rounds", str(rounds)]
        words += ["--max_seconds", str(round(seconds))]
        words += ["--max_new_tokens", str(BENCH_TOKENS), *self._system(), "--output_dir", str(output)]
        return CommandStep(f"{name}/bench", tuple(words), output / "bench.json")

    def other_engine(self, seconds: float) -> list[CommandStep]:
        """Return the commands that measure llama.cpp on a machine without a GPU, where it is often the fastest engine.
        It serves --model with 8-bit weights, or the file if --model is one, with and without drafts from the text.

        Args:
            seconds: time for the measurements.

        Returns:
            An empty list if llama.cpp cannot be compared. The last command is `bench`.
        """
        args, engine = self.args, LLAMACPP
        if sees_gpu() or args.infer_backend == engine.name or not engine.is_installed:
            return []
        if not engine.runs(self.model.family.name):
            return []
        directory = self.directory / engine.name
        steps = []
        file = Path(args.model)
        if not is_gguf(args.model):
            file = directory / "gguf" / f"gguf-{GGUF_TYPE}.gguf"
            words = ["export", "--to_gguf", "--model", args.model, "--gguf_type", GGUF_TYPE]
            words += ["--output_dir", str(file.parent)]
            steps.append(CommandStep(f"{engine.name}/export", tuple(words), file, is_atomic=True))
        words = ["bench", "--model", str(file), "--val_dataset", str(self.directory / HELD_OUT)]
        words += ["--infer_backend", engine.name, "--speculative", "ngram", "--num_speculative_tokens", "0", "3"]
        words += [*self._load(), "--rounds", "1", "--max_seconds", str(round(seconds))]
        words += ["--max_new_tokens", str(BENCH_TOKENS), *self._system()]
        words += ["--output_dir", str(directory / "bench")]
        return [*steps, CommandStep(f"{engine.name}/bench", tuple(words), directory / "bench" / "bench.json")]

    def _load(self) -> list[str]:
        """Return the options of `bench` for the numbers of concurrent requests and of prompts."""
        args = self.args
        max_prompts = max(MIN_BENCH_PROMPTS, *args.concurrency)
        return ["--concurrency", *map(str, args.concurrency), "--max_prompts", str(max_prompts)]

    def _model(self, model: str) -> list[str]:
        return model_words(self.args, model, self.args.torch_dtype or ENGINES[self.args.infer_backend].fastest_dtype)

    def _system(self) -> list[str]:
        args = self.args
        if args.system is None:
            return []
        return ["--system", args.system]
