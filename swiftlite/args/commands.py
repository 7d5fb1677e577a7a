"""Define the options class of each command, which combines groups of `fields.py` and the other files of fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import ClassVar, Literal

from swiftlite.args import data_fields, fields, rl_fields, serving_fields
from swiftlite.args.bounds import Fraction, Length, NonNegativeFloat, NonNegativeInt, Port, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class SftArgs(
    fields.ProfilingArgs,
    fields.RunArgs,
    fields.OptimArgs,
    fields.KernelArgs,
    fields.RecomputeArgs,
    fields.MegatronArgs,
    fields.DistributedArgs,
    fields.ParallelLayout,
    fields.MoeArgs,
    fields.IndexerArgs,
    data_fields.PackingArgs,
    data_fields.ImageArgs,
    fields.VisionArgs,
    data_fields.DataArgs,
    fields.LoraArgs,
    fields.MtpArgs,
    fields.ModelArgs,
):
    """Fine-tune a language model on megatron-core, with Multi-Token Prediction heads."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {}
    """Fields of the class that the command does not have as options, and why; `docs.options` does not return them. They
    keep their defaults, which the code of all training commands reads."""


_TRUNK_IS_TRAINED = {
    **dict.fromkeys(
        (
            *("cache_trunk_states", "stream_trunk", "stream_trunk_gb", "drafter", "drafter_layers", "markov_rank"),
            *("drafter_anchors", "mtp_features"),
        ),
        "it requires a frozen trunk",
    ),
    "mtp_mode": "it trains the trunk; to train only heads: swiftlite megatron sft --mtp_mode heads_only",
}
_ALL_ROWS_ARE_READ = dict.fromkeys(("streaming", "streaming_buffer_size"), "all rows are read before the first step")
_OF_IMAGES = (*fields_of(data_fields.ImageArgs), *fields_of(fields.VisionArgs))
_ROWS_HAVE_NO_IMAGES = dict.fromkeys([each.name for each in _OF_IMAGES], "its rows have no images")


@dataclass(frozen=True)
class PtArgs(data_fields.DocumentArgs, SftArgs):
    """Train a language model on plain text (continued pre-training), with Multi-Token Prediction heads."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "loss_scale": "all tokens of a document are trained",
        "system": "documents have no turns",
        "chat_template_kwargs": "documents have no chat template",
        "sft_mock_dataset_config_json": "random tokens are not documents",
        **_ROWS_HAVE_NO_IMAGES,
    }


@dataclass(frozen=True)
class DpoArgs(fields.PreferenceArgs, SftArgs):
    """Fine-tune a language model on preferences (DPO, KTO and others), with Multi-Token Prediction heads."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "loss_scale": "only the last answers of a row are trained",
        "sft_mock_dataset_config_json": "random tokens are not pairs",
        "sequence_packing_scheduler": "it balances single sequences",
        **_ALL_ROWS_ARE_READ,
        **_TRUNK_IS_TRAINED,
    }


_GENERATES_NOTHING = "a reward model generates no text, and has no MTP heads"


@dataclass(frozen=True)
class RmArgs(fields.RewardModelArgs, SftArgs):
    """Train a reward model on pairs of answers, with the loss of Bradley and Terry."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "loss_scale": "an answer has one reward",
        "sft_mock_dataset_config_json": "random tokens are not pairs",
        "sequence_packing_scheduler": "it balances single sequences",
        "mtp_tuner": _GENERATES_NOTHING,
        **dict.fromkeys([each.name for each in fields_of(fields.MtpArgs)], _GENERATES_NOTHING),
        **_ROWS_HAVE_NO_IMAGES,
        **_ALL_ROWS_ARE_READ,
        **dict.fromkeys(_TRUNK_IS_TRAINED, _GENERATES_NOTHING),
    }


_COMPLETIONS_ARE_DRAWN = {
    "sft_mock_dataset_config_json": "random tokens are not prompts",
    "mtp_graft_from": "train the grafted heads by megatron sft first",
    **_ALL_ROWS_ARE_READ,
    **_TRUNK_IS_TRAINED,
}


@dataclass(frozen=True)
class GrpoArgs(rl_fields.RewardArgs, rl_fields.RolloutArgs, rl_fields.PolicyArgs, SftArgs):
    """Fine-tune a language model on rewards of its completions (GRPO), which its Multi-Token Prediction heads draft."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "loss_scale": "all tokens of completions are trained",
        **_COMPLETIONS_ARE_DRAWN,
    }


@dataclass(frozen=True)
class GkdArgs(rl_fields.DistillationArgs, SftArgs):
    """Distil a teacher model into a smaller model (GKD), on answers and on completions that the model generates."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {**_ROWS_HAVE_NO_IMAGES, **_COMPLETIONS_ARE_DRAWN}


@dataclass(frozen=True)
class ConversionArgs:
    """Conversion"""

    model: str = ""
    """--to_hf: a run's output_dir (newest checkpoint) or a checkpoint-N. --to_mcore: a Hugging Face model, as for
    megatron sft. --to_gguf: either."""
    output_dir: str = ""
    """Output directory; must be empty or not exist."""
    to_hf: bool = False
    """Write Hugging Face safetensors, config and tokenizer, MTP heads included."""
    to_mcore: bool = False
    """Write a megatron-core distributed checkpoint like those of a run; `export --to_hf` converts it back."""
    to_gguf: bool = False
    """Write a GGUF file for llama.cpp, MTP heads included, from a run or a Hugging Face model."""
    gguf_type: Literal["f32", "bf16", "f16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k"] | None = None
    """With --to_gguf: type of the matrices. The decoder layer of a head is never coarser than q8_0. The types with k
    require llama-quantize. Default: bf16."""
    mtp: Literal["keep", "strip"] = "keep"
    """keep: export exactly the trained heads. strip: export no heads and declare none in config.json."""
    mtp_graft_from: str | None = None
    """Hugging Face model whose MTP heads replace those of the run, as in megatron sft."""
    draft_vocab: PositiveInt | None = None
    """With --to_hf: size of the draft vocabulary: heads draft only the most frequent tokens in the answers of the run's
    --dataset. Default: that of the run."""
    torch_dtype: Literal["bfloat16", "float32"] | None = None
    """Dtype of the exported tensors; float32 tensors of 16-bit models, such as a router's bias, keep the dtype of the
    source model. Default: the dtype of each tensor in the source model."""
    dequantize: bool = False
    """With --to_hf, for a run that trained only heads of a quantized model: write the trunk in --torch_dtype. Default:
    keep the files of the quantized trunk, and add the heads to them."""
    merge_lora: bool = True
    """true: merge LoRA adapters into the weights. false: with --to_hf, write only the adapters, in a directory that
    PEFT reads, with the MTP heads in a separate file."""
    max_shard_size_gb: PositiveFloat = 5.0
    """Maximum size of a safetensors file in GB (1e9 bytes)."""
    val_dataset: list[str] = field(default_factory=list)
    """Files or datasets on the hub with held-out rows for the limits below. With --quant_method, trunk and heads are
    also measured without a limit, and compared with those of the unquantized model."""
    infer_backend: str = "none"
    """With --quant_method: engine that also counts accepted drafts of the quantized and of the unquantized model on
    --val_dataset."""
    min_acceptance: Fraction | None = None
    """Minimum agreement of heads and trunk on --val_dataset (mean over depths, 0 to 1); refuse an export below it. With
    --to_gguf: minimum share of drafts that llama.cpp accepts."""
    max_regression: Fraction | None = None
    """Maximum decrease of the agreement of heads and trunk compared with --baseline (0 to 1); refuse an export beyond
    it."""
    max_trunk_loss: PositiveFloat | None = None
    """Maximum loss of the trunk on --val_dataset, in nats per token; refuse an export above it."""
    max_trunk_loss_increase: NonNegativeFloat | None = None
    """Maximum increase of the trunk's loss compared with --baseline, in nats per token; refuse an export beyond it. For
    example, 0.01 increases the perplexity by 1 %."""
    baseline: str | None = None
    """Hugging Face model to compare with. Default: the model that the run started from; with --quant_method the
    unquantized model."""
    force: bool = False
    """Keep an export that a limit refuses, with a warning."""
    push_to_hub: str | None = None
    """With --to_hf or --to_gguf: repository on the hub (ORG/NAME) that the complete, audited export is uploaded to,
    with a model card."""
    hub_private_repo: bool = True
    """Whether --push_to_hub creates a private repository; existing repositories are not changed."""


@dataclass(frozen=True)
class QuantizationArgs:
    """Quantization"""

    quant_method: Literal["rtn", "fp8", "nvfp4", "gptq", "awq"] | None = None
    """Quantize the projections of the trunk: rtn rounds to integers, fp8 to 8-bit floats, nvfp4 to 4-bit floats; gptq
    and awq choose integers with --dataset, by llm-compressor in a separate environment. With --to_hf, the result of a
    run; otherwise --model is a Hugging Face model. The result is in the format of compressed-tensors, or of DeepSeek-V3
    with --quant_block."""
    quant_bits: PositiveInt | None = None
    """Bits of a weight, 8 or 4. 8: one scale per channel; engines also round activations to 8 bits. 4: one scale per
    group. Default: 8 for rtn and fp8, 4 for nvfp4, gptq and awq."""
    group_size: PositiveInt | None = None
    """With integers of 4 bits: number of input columns with a common scale. Default: the largest of 128, 64 and 32 that
    divides the columns of all matrices."""
    quant_block: PositiveInt | None = None
    """With --quant_method fp8: rows and columns of a block with a common scale, in the format of DeepSeek-V3, such as
    128. For a run of an FP8 model with blocks of this size, the layout of the model is kept, and the codes of unchanged
    matrices. Default: one scale per channel."""
    quant_heads: Literal["keep", "block"] | None = None
    """keep: MTP heads are not quantized. block: their decoder layers are quantized like the trunk, with gptq and awq by
    rounding. Default: keep, or as in the FP8 model whose layout is kept."""
    dataset: list[str] = field(default_factory=list)
    """With gptq and awq: files or datasets on the hub (as for sft) with calibration rows, such as the training data."""
    quant_n_samples: PositiveInt = 256
    """Number of calibration rows, selected at random."""
    max_length: Length = 2048
    """Maximum length of a calibration row in tokens; longer ones are truncated right."""
    quant_batch_size: PositiveInt = 1
    """Maximum number of calibration rows, all of the same length, that are computed together."""


@dataclass(frozen=True)
class ExportArgs(fields.TimeoutArgs, fields.ParallelLayout, data_fields.ImageArgs, QuantizationArgs, ConversionArgs):
    """Convert a run to a Hugging Face model (--to_hf), or a model to a checkpoint (--to_mcore); quantize a model."""


@dataclass(frozen=True)
class InferArgs(
    serving_fields.AnswerArgs,
    data_fields.ImageArgs,
    fields.AdapterArgs,
    serving_fields.GenerationArgs,
    serving_fields.LlamacppArgs,
    serving_fields.SglangArgs,
    serving_fields.VllmArgs,
    serving_fields.SpeculationArgs,
    serving_fields.EngineArgs,
    fields.ModelArgs,
):
    """Generate with an engine, optionally with MTP drafts, and report how many drafts were accepted."""


@dataclass(frozen=True)
class RegenerateArgs(
    serving_fields.GenerationArgs,
    serving_fields.LlamacppArgs,
    serving_fields.SglangArgs,
    serving_fields.VllmArgs,
    serving_fields.SpeculationArgs,
    serving_fields.EngineArgs,
    data_fields.ImageArgs,
    serving_fields.RegenerationArgs,
    fields.ModelArgs,
):
    """Regenerate the answers of a dataset with the model itself, the best training data for its heads."""


GenerationCommand = InferArgs | RegenerateArgs
"""The commands that generate answers with an engine."""


@dataclass(frozen=True)
class DeployArgs(
    serving_fields.LlamacppArgs,
    serving_fields.SglangArgs,
    serving_fields.VllmArgs,
    serving_fields.SpeculationArgs,
    serving_fields.ServerArgs,
    fields.AdapterArgs,
    fields.ModelArgs,
):
    """Serve a Hugging Face model with an engine's own OpenAI-compatible server and MTP drafts."""


@dataclass(frozen=True)
class BenchArgs(
    serving_fields.VllmArgs,
    serving_fields.LlamacppArgs,
    data_fields.ImageFileArgs,
    serving_fields.BenchmarkArgs,
    fields.ModelArgs,
):
    """Measure an engine's server with and without drafts at each concurrency, and recommend a number of drafts."""


def deploy_args(args: BenchArgs, num_speculative_tokens: int) -> DeployArgs:
    """Return the options with which `deploy` starts the server that `bench` measures."""
    speculative: serving_fields.Speculative = "none"
    num_tokens = config = None
    if num_speculative_tokens > 0:
        speculative = args.speculative
        num_tokens = num_speculative_tokens
        if args.vllm_speculative_config is not None:
            config = {**args.vllm_speculative_config, "num_speculative_tokens": num_tokens}
            num_tokens = None
    return DeployArgs(
        model=args.model,
        torch_dtype=args.torch_dtype,
        trust_remote_code=args.trust_remote_code,
        chat_template_kwargs=args.chat_template_kwargs,
        infer_backend=args.infer_backend,
        speculative=speculative,
        num_speculative_tokens=num_tokens,
        max_model_len=args.max_model_len,
        vllm_engine_kwargs=args.vllm_engine_kwargs,
        vllm_limit_mm_per_prompt=args.vllm_limit_mm_per_prompt,
        vllm_speculative_config=config,
        sglang_engine_kwargs=args.sglang_engine_kwargs,
        llamacpp_engine_kwargs=args.llamacpp_engine_kwargs,
    )


@dataclass(frozen=True)
class EvaluateArgs(
    serving_fields.MonitoringArgs,
    serving_fields.TaskArgs,
    serving_fields.SpeculationArgs,
    data_fields.ImageArgs,
    serving_fields.EvaluationArgs,
    fields.ModelArgs,
):
    """Measure the acceptance of MTP heads by depth and channel, against the trunk and by an engine's counters."""

    @property
    def task_engine(self) -> str:
        """The engine whose server answers --tasks."""
        return "vllm" if self.infer_backend == "none" else self.infer_backend


@dataclass(frozen=True)
class SpeedupArgs(serving_fields.SpeedupOptions, fields.ModelArgs):
    """Make a model faster: train draft heads within a time budget, and measure what to draft at which load."""


@dataclass(frozen=True)
class AdaptArgs(serving_fields.AdaptOptions, fields.ModelArgs):
    """Train heads on the requests of a running server, and send it those that are better."""


@dataclass(frozen=True)
class ExaminationArgs:
    """Examination"""

    model: str | None = None
    """Hugging Face model, as for megatron sft, to validate: shards, index, MTP depth, config. --plan requires only
    config.json."""
    engine: str | None = None
    """Also run this engine's configuration and weight loaders on --model, without starting the engine, and report
    uninitialized parameters, unread tensors, and the draft class with its number of heads. If SGLang is not installed,
    print what is known of its classes."""
    trust_remote_code: bool = False
    """With --engine: allow running Python files from the directory of the model."""
    torch_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """With --engine: dtype of the parameters."""


@dataclass(frozen=True)
class PlanArgs:
    """Plan of a run"""

    plan: bool = False
    """Instead of validating --model, estimate the memory of training it on each rank, and whether it fits. All options
    of megatron sft apply. An option of another training command plans that command: --loss_type of megatron dpo,
    --max_completion_length of grpo, --teacher_model without it of gkd, --center_rewards_coefficient of rm. Without
    --model: which sizes of Qwen3 fit on one GPU, for several kinds of runs."""
    num_gpus: PositiveInt | None = None
    """With --plan: number of GPUs. Default: the minimum of the layout."""
    gpu_type: str | None = None
    """With --plan: GPU model, such as H100: rank the layouts that fit on --num_gpus of these by estimated speed,
    keeping the sizes that are set. Default: plan only the given layout."""
    gpu_memory_gb: PositiveFloat | None = None
    """With --plan: memory of one GPU in GB (1e9 bytes). Default: that of --gpu_type, or 80."""
    images_per_row: NonNegativeInt = 0
    """With --plan: number of images of each row, with --max_pixels pixels each, by default the maximum of the model."""


@dataclass(frozen=True)
class DoctorArgs(serving_fields.VllmArgs, serving_fields.SpeculationArgs, PlanArgs, ExaminationArgs):
    """Check the environment, validate a model, also with an engine (--engine), and plan memory and layouts (--plan)."""


@dataclass(frozen=True)
class PlannedRun:
    """The options of `doctor --plan`.

    Attributes:
        own: options of doctor.
        run: options of the planned run.
    """

    own: PlanArgs
    run: SftArgs


@dataclass(frozen=True)
class ComparisonArgs:
    """Runs"""

    runs: list[str] = field(default_factory=list)
    """Directories of training runs (their --output_dir), finished or not. The flag itself is optional."""
    output: str | None = None
    """HTML file to write. Default: run_report.html in the run; for several runs, runs.html in the current directory."""
    serve: bool = False
    """Serve the page on this machine instead of writing it, and update it while the runs are in progress."""
    port: Port | None = None
    """Port of --serve. [6006]"""


@dataclass(frozen=True)
class ReportArgs(ComparisonArgs):
    """Rewrite the page of a run, or compare several runs on one page: figures, differing options, curves."""
