"""Run real vLLM in one process. A start takes 3 s instead of 30 s, and the draft model's logits can be read.

Scheduler, model runner, kernels and classes are those for which vLLM otherwise starts processes. Each run uses a new
process that is not pytest's, because vLLM changes much of the process in which it runs.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from swiftlite.acceptance.counts import DraftCounts
from swiftlite.base.errors import UserError
from swiftlite.engines.draft_schedule import DraftSchedule
from swiftlite.engines.engine import EngineConfig, Sampling, start_engine
from swiftlite.engines.prompts import most_images
from swiftlite.engines.served_model import resolve_served
from tests.forked import Host
from tests.vllm_forks import vllm_forks
from tests.weights_of import trunk_and_heads

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@dataclass(frozen=True)
class Served:
    """The results of vLLM for some prompts.

    Args:
        token_ids: generated tokens of all prompts, which are served at the same time.
        counts: vLLM's draft counts for these prompts.
        draft: class of the draft model; "" without drafts.
        logits: the draft model's logits, [steps, num_speculative_tokens, vocabulary], of each prompt served alone.
        num_compiled: number of models that vLLM has compiled, from its own count.
        draft_depths: `Completion.draft_depths` of each prompt.
        prefix_hits: number of tokens of `repeated` that vLLM found in its prefix cache the second time.
    """

    token_ids: list[list[int]]
    counts: DraftCounts
    draft: str
    logits: list[torch.Tensor]
    num_compiled: int = 0
    draft_depths: Sequence[list[int] | None] = ()
    prefix_hits: int = 0


@dataclass(frozen=True)
class Replay:
    """What vLLM computed for one prompt that was served alone.

    Args:
        token_ids: generated tokens.
        counts: vLLM's draft counts.
        draft: class of the draft model.
        draft_logits: the draft model's logits in each step, [num_speculative_tokens, vocabulary].
        target_logits: the target's logits: of the prompt, [1, vocabulary], then in each step,
            [1 + num_speculative_tokens, vocabulary].
    """

    token_ids: list[int]
    counts: DraftCounts
    draft: str
    draft_logits: list[torch.Tensor]
    target_logits: list[torch.Tensor]


# What of vLLM an engine in one process imports; it starts no thread.
MODULES = [
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "swiftlite.engines.vllm.engine",
]


def start_host() -> Host:
    """Start a process that imports vLLM once for all calls, because importing takes longer than starting the engine."""
    return Host(MODULES, ENVIRONMENT, vllm_forks.install)


def serve(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    num_speculative_tokens: int,
    num_alone: int = 0,
    weights_of: Path | None = None,
    dtype: Literal["bfloat16", "float32"] = "float32",
    compile_in: Path | None = None,
    repeated: Sequence[int] = (),
) -> Served:
    """Start vLLM, generate greedily, and stop it.

    Args:
        repeated: a prompt that is answered twice at the end.
        compile_in: directory for what vLLM compiles; None: vLLM does not compile, as by default on a CPU.
        weights_of: checkpoint of the same shapes whose weights are sent to the engine before it generates.
        num_alone: number of prompts (the first ones) whose draft logits are returned.
    """
    compiling = {}
    if compile_in is not None:
        os.environ["VLLM_CACHE_ROOT"] = str(compile_in)
        compiling = {"enforce_eager": False}
    config = EngineConfig(
        resolve_served(directory),
        dtype,
        num_speculative_tokens=num_speculative_tokens,
        max_images=most_images(prompts),
        max_model_len=max(256, len(repeated) + 16),
        engine_kwargs=compiling,
    )
    engine: Any = start_engine("vllm", config)
    from vllm.compilation.counter import compilation_counter

    try:
        if weights_of is not None:
            engine.generate(prompts, Sampling(new_tokens))  # what it keeps of the old weights must not stay
            engine.update_weights(*trunk_and_heads(weights_of))
        before = engine.draft_counts()
        completions = engine.generate(prompts, Sampling(new_tokens))
        counts = engine.draft_counts().since(before)
        draft = ""
        if num_speculative_tokens:
            (draft,) = engine._llm.collective_rpc(_keep_draft_logits)
        logits = []
        for prompt in prompts[:num_alone]:
            engine.generate([prompt], Sampling(new_tokens))
            logits.append(torch.cat(_kept).view(-1, num_speculative_tokens, _kept[0].size(-1)))
            _kept.clear()
        hits = prefix_hits(engine, repeated) if repeated else 0
    finally:
        engine.close()
    token_ids = [completion.token_ids for completion in completions]
    num_compiled = compilation_counter.num_aot_compiles + compilation_counter.num_aot_artifacts_loaded
    return Served(token_ids, counts, draft, logits, num_compiled, prefix_hits=hits)


def replay(
    directory: Path, prompts: Sequence[Sequence[int]], new_tokens: int, num_speculative_tokens: int
) -> list[Replay]:
    """Start vLLM in bfloat16, generate greedily for one prompt at a time, and return all logits."""
    config = EngineConfig(
        resolve_served(directory), "bfloat16", num_speculative_tokens=num_speculative_tokens, max_model_len=256
    )
    engine: Any = start_engine("vllm", config)
    replays = []
    try:
        (draft,) = engine._llm.collective_rpc(_keep_draft_logits)
        engine._llm.collective_rpc(_keep_target_logits)
        for prompt in prompts:
            _kept.clear()
            _kept_of_target.clear()
            before = engine.draft_counts()
            (completion,) = engine.generate([prompt], Sampling(new_tokens))
            counts = engine.draft_counts().since(before)
            drafted = list(torch.cat(_kept).float().split(num_speculative_tokens))
            replays.append(
                Replay(completion.token_ids, counts, draft, drafted, [logits.float() for logits in _kept_of_target])
            )
    finally:
        engine.close()
    return replays


def drafted_by_load(
    directory: Path, schedule: DraftSchedule, loads: list[list[list[int]]], repeated: list[int]
) -> tuple[list[Served], int]:
    """Serve several groups of prompts, one after another, with a vLLM that uses a draft schedule.

    Returns:
        The results of each group, and the `prefix_hits` of `repeated`.
    """
    from swiftlite.engines.vllm.options import schedule_options

    given = {"method": "mtp", "num_speculative_tokens": schedule.largest, **schedule_options(schedule)}
    engine: Any = start_engine(
        "vllm",
        EngineConfig(resolve_served(directory), "float32", max_model_len=len(repeated) + 16, speculative_config=given),
    )
    served = []
    try:
        for prompts in loads:
            before = engine.draft_counts()
            completions = engine.generate(prompts, Sampling(12))
            counts = engine.draft_counts().since(before)
            token_ids = [completion.token_ids for completion in completions]
            depths = [completion.draft_depths for completion in completions]
            served.append(Served(token_ids, counts, "", [], draft_depths=depths))
        return served, prefix_hits(engine, repeated)
    finally:
        engine.close()


def drafted_after_load(
    directory: Path, schedule: DraftSchedule, prompts: list[list[int]], lengths: list[int], case: str
) -> tuple[list[list[int]], torch.Tensor, list[int]]:
    """Serve requests of different lengths with a draft schedule, so that the load falls while some are in progress.

    Args:
        lengths: number of tokens of each answer.
        case: "swiftlite" postpones steps of the head that draft nothing; "vllm" runs them at once; "lost" never runs
            them.

    Returns:
        The answers, the head's states that drafts are made from [drafts, hidden size], and the number of tokens per
            request in each call of the head without drafts.
    """
    from vllm import SamplingParams
    from vllm.v1.spec_decode import llm_base_proposer

    from swiftlite.engines.vllm import postponed
    from swiftlite.engines.vllm.options import schedule_options

    if case == "vllm":
        postponed.can_postpone = lambda *_: False
    if case == "lost":
        postponed._compute = lambda *_: None
    sizes: list[int] = []
    states: list[torch.Tensor] = []
    drafter: Any = llm_base_proposer.SpecDecodeBaseProposer
    inputs_of, draft = drafter.set_inputs_first_pass, drafter._greedy_sample

    def counting(proposer: Any, **named: Any) -> Any:
        if proposer.num_speculative_tokens == 0:
            sizes.append(named["cad"].max_query_len)
        return inputs_of(proposer, **named)

    def recording(proposer: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        states.append(hidden_states.clone())
        return draft(proposer, hidden_states)

    drafter.set_inputs_first_pass = counting
    drafter._greedy_sample = recording
    given = {"method": "mtp", "num_speculative_tokens": schedule.largest, **schedule_options(schedule)}
    config = EngineConfig(resolve_served(directory), "float32", max_model_len=256, speculative_config=given)
    engine: Any = start_engine("vllm", config)
    try:
        parameters = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths
        ]
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine._llm.generate(asked, parameters, use_tqdm=False)
        answers = [list(output.outputs[0].token_ids) for output in outputs]
        return answers, torch.cat(states), sizes
    finally:
        engine.close()


def prefix_hits(engine: Any, prompt: Sequence[int]) -> int:
    """Return the number of tokens that vLLM finds in its prefix cache when it answers a prompt for the second time."""

    def hits() -> int:
        return sum(metric.value for metric in engine._llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")

    engine.generate([prompt], Sampling(4))
    before = hits()
    engine.generate([prompt], Sampling(4))
    return hits() - before


def load_draft(directory: Path, plugins: str | None = None) -> tuple[str, int]:
    """Return the draft's class and the number of its parameters that vLLM's loader filled, without an engine.

    Args:
        plugins: names of the plugins that vLLM may load; None: all installed plugins.
    """
    if plugins is not None:
        os.environ["VLLM_PLUGINS"] = plugins
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model

    options = EngineArgs(
        model=str(directory),
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    )
    config = options.create_engine_config()
    assert config.speculative_config is not None
    with tempfile.NamedTemporaryFile() as file, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{file.name}", 0, "gloo")
        initialize_model_parallel()
        draft_config = config.speculative_config.draft_model_config
        draft = initialize_model(vllm_config=config, model_config=draft_config)
        get_model_loader(config.load_config).load_weights(draft, draft_config)
    return type(draft).__name__, sum(1 for _ in draft.parameters())


def refused_format(directory: Path, has_amx: bool) -> str:
    """Return why swiftlite refuses the format of a model for vLLM on such a CPU; "" if it does not."""
    from swiftlite.engines.vllm import options

    with patch.object(options, "has_amx", lambda: has_amx):
        try:
            options.check_quantization(resolve_served(directory))
        except UserError as error:
            return error.problem
    return ""


def refused_on(has_avx512: bool, directory: Path) -> str:
    """Return why swiftlite refuses to start vLLM with a model on such an x86 processor; "" if it does not."""
    from swiftlite.engines.vllm import options

    with (
        patch.object(torch.cpu, "_is_avx512_supported", lambda: has_avx512),
        patch.object(options.platform, "machine", lambda: "x86_64"),
    ):
        try:
            options.check_instructions(resolve_served(directory))
        except UserError as error:
            return error.problem
    return ""


def start_unchecked(directory: Path, is_tracked: bool) -> str:
    """Start vLLM with heads, without swiftlite's check of quantized heads; return vLLM's error, or "" if it starts.

    Args:
        is_tracked: whether vLLM is started with swiftlite's options for quantized models.
    """
    from vllm import LLM

    from swiftlite.engines.vllm.options import loading_options

    options: dict[str, Any] = {}
    if is_tracked:
        options = loading_options(resolve_served(directory), {})
        assert options
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    try:
        LLM(
            model=str(directory),
            dtype="bfloat16",
            max_model_len=64,
            enforce_eager=True,
            skip_tokenizer_init=True,
            speculative_config=speculative,
            **options,
        )
    except ValueError as error:
        return str(error)
    return ""


_kept: list[torch.Tensor] = []
_kept_of_target: list[torch.Tensor] = []


def _keep_draft_logits(worker) -> str:
    """On vLLM's worker, store all logits of the draft model in `_kept`; return the draft model's class."""
    return _keep_logits(worker.model_runner.drafter.model, _kept)


def _keep_target_logits(worker) -> str:
    """On vLLM's worker, store all logits of the target model in `_kept_of_target`; return the model's class."""
    return _keep_logits(worker.model_runner.model, _kept_of_target)


def _keep_logits(model: Any, kept: list[torch.Tensor]) -> str:
    compute_logits = model.compute_logits

    def compute_and_keep(*args, **kwargs) -> torch.Tensor:
        logits = compute_logits(*args, **kwargs)
        kept.append(logits.clone())
        return logits

    model.compute_logits = compute_and_keep
    return type(model).__name__
