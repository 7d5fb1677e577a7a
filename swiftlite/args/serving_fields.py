"""Define the options of engines, servers, measurements and answers, as groups of fields (see `fields.py`)."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from swiftlite.args import bounds

WeightTransport = Literal["file", "nccl", "ipc"]
Speculative = Literal["none", "mtp", "mtp,ngram", "ngram"]
WITH_HEADS = ("mtp", "mtp,ngram")
"""Values of `Speculative` with which heads draft."""
FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty")
"""Options of `SamplingArgs` that change the distribution of the next token."""


@dataclass(frozen=True)
class EngineArgs:
    """Engine"""

    infer_backend: str = "transformers"
    """Engine that generates."""
    speculative: Speculative = "none"
    """mtp: the checkpoint's heads draft tokens and the trunk verifies them. mtp,ngram: where the last tokens occurred
    before in prompt or answer, the tokens that followed them are drafted instead. ngram: only these, without heads."""
    draft_confidence: bounds.Fraction | None = None
    """Stop drafting in a step after a draft whose probability is below this threshold; the output does not change.
    `swiftlite evaluate` finds the fastest value. Default: always draft --num_speculative_tokens."""


@dataclass(frozen=True)
class SpeculationArgs:
    """Speculation"""

    num_speculative_tokens: bounds.PositiveInt | None = None
    """Number of draft tokens per step; with mtp,ngram, those of the heads. Default: the number that the heads were
    trained for (their depth, or --mtp_unroll); with ngram, a number of the engine."""


@dataclass(frozen=True)
class VllmArgs:
    """Options of vLLM"""

    vllm_engine_kwargs: dict[str, Any] | None = None
    """JSON: keyword arguments of vLLM's engine, which override swiftlite's; null removes one."""
    vllm_limit_mm_per_prompt: dict[str, bounds.NonNegativeInt] | None = None
    """JSON: maximum number of images of a prompt, such as {"image": 4}. Default: that of the prompts; for servers,
    vLLM's."""
    vllm_speculative_config: dict[str, Any] | None = None
    """JSON: vLLM's complete speculative_config. Default: derived from the checkpoint."""


@dataclass(frozen=True)
class SglangArgs:
    """Options of SGLang"""

    sglang_engine_kwargs: dict[str, Any] | None = None
    """JSON: options of SGLang's engine, with underscores in their names, which override swiftlite's; null removes
    one."""
    sglang_speculative_algorithm: Literal["NEXTN", "EAGLE"] | None = None
    """SGLang's algorithm for MTP heads; both names mean the same. Default: NEXTN."""
    sglang_speculative_num_steps: bounds.PositiveInt | None = None
    """Number of consecutive draft steps. Set the numbers of steps, branches (topk) and draft tokens together or none of
    them. Default: derived from the checkpoint."""
    sglang_speculative_eagle_topk: bounds.PositiveInt | None = None
    """Number of branches per draft step. Default: 1, a chain."""
    sglang_speculative_num_draft_tokens: Annotated[int, Interval(ge=2)] | None = None
    """Number of tokens verified at once, including the newest token; for a chain, one more than the number of draft
    steps."""


@dataclass(frozen=True)
class LlamacppArgs:
    """Options of llama.cpp"""

    llamacpp_engine_kwargs: dict[str, Any] | None = None
    """JSON: options of llama-server, with underscores in their names, which override swiftlite's; null removes one."""


@dataclass(frozen=True)
class ServerArgs:
    """Server"""

    infer_backend: str = "vllm"
    """Engine whose OpenAI-compatible server is started."""
    speculative: Speculative | None = None
    """mtp: the checkpoint's heads draft tokens and the trunk verifies them. mtp,ngram: where the last tokens occurred
    before in prompt or answer, the tokens that followed them are drafted instead. ngram: only these, without heads.
    Default: mtp if there are heads."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 means all addresses of this machine."""
    port: bounds.Port = 8000
    """Port to listen on."""
    served_model_name: str | None = None
    """Name of the model in requests and in /v1/models. Default: ORG/NAME for a model on the hub, otherwise the last
    part of the path."""
    draft_schedule: str | None = None
    """A bench.json of `swiftlite bench`: adapt the number of draft tokens to the number of in-flight requests as it
    recommends."""
    max_model_len: bounds.Length | None = None
    """Maximum length of prompt and answer in tokens. Default: the model's limit."""
    live_weights: bool = False
    """Accept new weights from a trainer while serving. Anyone who can reach the port can then replace the weights and
    pause the server: use a loopback --host, or set an api_key."""
    weight_transport: WeightTransport = "file"
    """With --live_weights: transport of new weights. file: the temporary directory of this machine; nccl: from GPU to
    GPU, also between machines; ipc: within the GPU that trainer and server share."""
    log_requests: str | None = None
    """File (.jsonl) to which answered chat requests are appended as training rows: messages, tools and the answer, no
    headers or addresses. Default: requests are not logged."""
    log_requests_max_size_mb: bounds.PositiveFloat = 100.0
    """Maximum size of --log_requests in MB (1e6 bytes). A full FILE.jsonl is renamed to FILE.1.jsonl and replaces an
    older file of this name."""
    dry_run: bool = False
    """Print the command instead of running it."""


@dataclass(frozen=True)
class EvaluationArgs:
    """Evaluation"""

    dataset: list[str] = field(default_factory=list)
    """Files or datasets on the hub (as for sft) with answers that the model was not trained on; channels are reported
    separately. With --infer_backend also questions without answers, such as speed-bench:DIR or Spec-Bench's
    question.jsonl."""
    baseline: str | None = None
    """Hugging Face model, as for --model, to compare with, such as the one before training."""
    output_dir: str = ""
    """Directory for evaluation.json, evaluation.svg and evaluation.html, or with --server for
    acceptance_over_time.jsonl; may exist."""
    infer_backend: str = "none"
    """Engine that generates answers and counts accepted drafts; none: teacher-forced measures only."""
    max_prompts: bounds.PositiveInt = 64
    """Maximum number of prompts per channel for the engine."""
    max_new_tokens: bounds.PositiveInt = 64
    """Maximum length of an answer in tokens."""
    temperature: bounds.NonNegativeFloat = 0.0
    """Above 0, the engine also samples answers at this temperature, and the report shows both acceptance rates."""
    draft_confidence: list[float] = field(default_factory=list)
    """Values of infer's --draft_confidence to compare, such as 0,0.2,0.4,0.6; a table reports the speed of each."""
    max_length: bounds.Length = 2048
    """Maximum length of a row in tokens; longer ones are truncated right. With --tasks: of prompt and answer; longer
    prompts are truncated left."""
    max_bad_rows: bounds.NonNegativeInt = 0
    """Maximum number of malformed rows before the command stops; each is reported with file:line."""
    system: str | None = None
    """System prompt for rows without one."""
    acceptance_json: str | None = None
    """acceptance.json of a run or of a quantized export, to which the acceptance that --infer_backend counted for
    --model and --baseline is added."""


@dataclass(frozen=True)
class TaskArgs:
    """Tasks of lm-evaluation-harness"""

    tasks: list[str] = field(default_factory=list)
    """Instead, measure the quality of answers with these tasks of lm-evaluation-harness, such as gsm8k,ifeval, together
    with acceptance and speed. A server of --infer_backend (default: vllm) is started as by `deploy`; with --server, a
    running one is used. Finished tasks in --output_dir are not repeated."""
    include_path: str | None = None
    """Directory with task files (YAML) of your own. Paths in them are relative to it. Task files can execute Python
    code."""
    compare: bool = False
    """Also answer without drafts, and report the share of equal answers and the speed of both."""
    num_fewshot: bounds.NonNegativeInt | None = None
    """Number of examples before each question. Default: that of the task."""
    limit: bounds.PositiveFloat | None = None
    """Maximum number of questions per task, or below 1 their share. Default: all."""
    apply_chat_template: bool = False
    """Format questions with the chat template of the model."""
    num_concurrent: bounds.PositiveInt = 1
    """Number of requests that are sent at the same time."""
    lm_eval_model_args: dict[str, Any] | None = None
    """JSON: further model_args of lm-evaluation-harness, such as {"add_bos_token": true}."""
    confirm_run_unsafe_code: bool = False
    """Allow tasks that execute programs written by the model, such as humaneval. They run without a sandbox."""


@dataclass(frozen=True)
class MonitoringArgs:
    """Monitoring"""

    server: str | None = None
    """Instead, read the draft counters of a running server of vLLM, llama.cpp or transformers at this address, add
    them to acceptance_over_time.jsonl, and report the acceptance between readings. With --tasks: the server of
    --model that answers."""
    since: str | None = None
    """With --server: start from the last reading older than this duration, such as 24h or 1h30m. Default: all
    readings."""


@dataclass(frozen=True)
class BenchmarkArgs:
    """Benchmark"""

    val_dataset: list[str] = field(default_factory=list)
    """Files or datasets on the hub with prompts (rows as for sft, without the last assistant turn), speed-bench:DIR, or
    Spec-Bench's question.jsonl."""
    output_dir: str = ""
    """Directory for bench.json, bench.svg, bench.html and the servers' logs; may exist."""
    infer_backend: str = "vllm"
    """Engine whose server is measured, started as by `deploy`."""
    speculative: Literal["mtp", "mtp,ngram", "ngram"] = "mtp"
    """Drafts of the servers with drafts, as in deploy."""
    num_speculative_tokens: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    """Numbers of draft tokens per step to measure, with one server each; with mtp,ngram, of the heads. Must include
    0."""
    concurrency: list[int] = field(default_factory=lambda: [1, 8, 32])
    """Numbers of concurrent requests to measure."""
    rounds: bounds.PositiveInt = 5
    """Number of times that every prompt is sent at each concurrency; more rounds separate small gains from noise."""
    repeat_prompts: bool = False
    """Share the prefix cache between rounds, as if the same prompts were sent again; the table reports cache hits with
    and without drafts."""
    max_prompts: bounds.PositiveInt = 64
    """Maximum number of prompts, the first ones of the files."""
    max_seconds: bounds.PositiveInt | None = None
    """Time for all measurements, without the starts and the warm-up of servers. On a slow machine, fewer prompts are
    sent, the same ones to each server, and never fewer than the largest --concurrency. Default: no limit."""
    max_new_tokens: bounds.PositiveInt = 128
    """Maximum length of an answer in tokens."""
    temperature: bounds.NonNegativeFloat = 0.0
    """Temperature of all requests. Sampled answers (above 0) are not compared."""
    max_model_len: bounds.Length | None = None
    """Maximum length of prompt and answer in tokens. Default: the model's limit."""
    system: str | None = None
    """System prompt for rows without one."""
    sglang_engine_kwargs: dict[str, Any] | None = None
    """JSON: options of SGLang's server, with underscores in their names, which override swiftlite's; null removes
    one."""


@dataclass(frozen=True)
class SpeedupOptions:
    """Speed-up"""

    output_dir: str = ""
    """Directory for all results; the same command resumes from it, and a larger --budget continues."""
    drafter: Literal["mtp", "auto", "eagle3.1", "dflash", "dspark"] = "mtp"
    """What is trained: MTP heads, or another drafter as for megatron sft. auto: MTP heads, and with a budget of 45m or
    more also dspark; the one with the higher measured speed is recommended."""
    budget: str = "1h"
    """Time for the whole command, such as 45m or 1h30m; at least 5m. No round starts that would exceed it, except the
    first; bench runs in any case."""
    dataset: list[str] = field(default_factory=list)
    """Files or datasets on the hub with prompts (rows as for sft) similar to the expected requests. Default: the model
    writes all prompts."""
    self_prompts_share: bounds.Fraction = 0.5
    """With --dataset: share of prompts that the model writes itself."""
    infer_backend: str = "vllm"
    """Engine that answers the prompts and serves the model."""
    torch_dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of the parameters. Default: float32 for vLLM on a processor without instructions for bfloat16, otherwise
    bfloat16."""
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16])
    """Numbers of concurrent requests at which the speed is measured at the end."""
    max_new_tokens: bounds.PositiveInt = 128
    """Maximum length of an answer in tokens."""
    system: str | None = None
    """System prompt of all conversations without one."""
    seed: bounds.Seed = 42
    """Seed for sampling prompts."""


@dataclass(frozen=True)
class AdaptOptions:
    """Adaptation"""

    server: str = ""
    """Address of a vLLM server that runs --model with its heads, started by swiftlite deploy --live_weights
    --log_requests FILE, such as http://127.0.0.1:8000. Its API key is read from VLLM_API_KEY."""
    request_log: str = ""
    """File of the server's --log_requests."""
    output_dir: str = ""
    """Directory for heads, measurements and decisions; the same command resumes from it."""
    min_rows: bounds.PositiveInt = 128
    """Number of new conversations with which a round of training begins."""
    max_rows: bounds.PositiveInt = 2000
    """Maximum number of conversations for training, the newest ones."""
    rounds: bounds.PositiveInt | None = None
    """Number of rounds. Default: until Ctrl-C."""
    num_train_epochs: bounds.PositiveInt = 2
    """Passes over the conversations of a round."""
    lr: bounds.PositiveFloat = 3e-4
    """Peak learning rate of the heads."""
    max_length: bounds.Length = 1024
    """Maximum length of a conversation in tokens; longer ones are not trained."""
    poll_seconds: bounds.PositiveFloat = 15.0
    """Seconds between two looks at the log and the server."""


@dataclass(frozen=True)
class SamplingArgs:
    """Sampling"""

    top_p: bounds.PositiveFraction = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with this total probability."""
    top_k: bounds.NonNegativeInt = 0
    """Sample from this number of most likely tokens. 0: all tokens."""
    min_p: bounds.Fraction = 0.0
    """Sample from the tokens with at least this share of the probability of the most likely one."""
    repetition_penalty: Annotated[float, Interval(gt=0, le=2)] = 1.0
    """Above 1, tokens of the prompt and of the text so far become less likely: positive logits are divided by this
    number, negative ones are multiplied by it. Also applies to greedy decoding."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end an answer, which includes the text."""


@dataclass(frozen=True)
class GenerationArgs(SamplingArgs):
    """Generation"""

    max_new_tokens: bounds.PositiveInt = 256
    """Maximum length of an answer in tokens."""
    temperature: bounds.NonNegativeFloat = 0.0
    """0 is greedy. Above 0 tokens are sampled, and with --speculative drafts as well; the output keeps the trunk's
    distribution. SGLang on a CPU supports speculation only at temperature 0."""
    max_batch_size: bounds.PositiveInt = 32
    """Maximum number of prompts that the engine processes at once."""
    max_model_len: bounds.Length | None = None
    """Maximum length of prompt and answer in tokens. Default: what the prompts require, within the model's limit."""
    system: str | None = None
    """System prompt for rows and chats without one."""
    seed: bounds.Seed = 42
    """Seed for sampling."""


@dataclass(frozen=True)
class AnswerArgs:
    """Prompts and answers"""

    val_dataset: list[str] = field(default_factory=list)
    """Files or datasets on the hub with prompts (rows as for sft, without the last assistant turn). Default: chat on
    stdin."""
    result_path: str | None = None
    """JSON Lines file that answers are appended to as they finish; the same command resumes. Default: stdout."""
    compare: bool = False
    """Also run the prompts without speculation; print the speedup and, at temperature 0, whether the answers are
    equal."""
    acceptance_json: str | None = None
    """acceptance.json of a run, to which this engine's acceptance is added, separately for each temperature."""


@dataclass(frozen=True)
class RegenerationArgs:
    """Rows and their new answers"""

    dataset: list[str] = field(default_factory=list)
    """Files or datasets on the hub (as for sft) whose assistant turns are regenerated; FILE#500 selects a random
    sample."""
    self_prompts: bounds.NonNegativeInt = 0
    """Number of prompts that the model writes itself, in addition to --dataset; unusable ones are dropped."""
    self_turns: bounds.PositiveInt = 1
    """Number of user turns in each conversation of --self_prompts."""
    topics: str | None = None
    """File with one topic per line for --self_prompts; each new conversation is about the next topic in the file.
    Default: the model chooses."""
    openings: str | None = None
    """File with one opening per line for --self_prompts, such as "Translate into French:"; each conversation starts
    with the next opening, which the model completes. `builtin`: 80 openings for translation, extraction, code and other
    tasks."""
    openings_share: bounds.PositiveFraction = 1.0
    """With --openings: share of the conversations of --self_prompts that start with an opening."""
    max_prompt_tokens: bounds.PositiveInt = 256
    """Maximum length of a user turn of --self_prompts in tokens; a longer one ends after a complete sentence."""
    output_dir: str = ""
    """Directory for dataset.jsonl, report.json and the answers; the same command resumes from these."""
    num_answers: bounds.PositiveInt = 1
    """Number of answers per prompt; duplicates are removed."""
    gold_fraction: bounds.ProperFraction = 0.0
    """Share of original rows of --dataset in dataset.jsonl, drawn at random; below 1."""
    drop_truncated: bool = False
    """Drop answers that were truncated at --max_new_tokens, and the turns after them."""
    max_bad_rows: bounds.NonNegativeInt = 0
    """Maximum number of malformed rows before the command stops; each is reported with file:line."""
