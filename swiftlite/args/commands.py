"""One class per command, composed of the groups in `fields.py`."""

from dataclasses import dataclass, field
from typing import Literal

from swiftlite.args import fields
from swiftlite.args.bounds import Fraction, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class SftArgs(
    fields.RunArgs,
    fields.OptimArgs,
    fields.KernelArgs,
    fields.RecomputeArgs,
    fields.DistributedArgs,
    fields.ParallelLayout,
    fields.MoeArgs,
    fields.PackingArgs,
    fields.DataArgs,
    fields.LoraArgs,
    fields.MtpArgs,
    fields.ModelArgs,
):
    """Fine-tune a language model on megatron-core, with Multi-Token Prediction heads."""


@dataclass(frozen=True)
class PtArgs(fields.DocumentArgs, SftArgs):
    """Train a language model on plain text (continued pre-training), with Multi-Token Prediction heads."""


@dataclass(frozen=True)
class DpoArgs(fields.PreferenceArgs, SftArgs):
    """Tune a language model by pairs of answers of which one is preferred, with Multi-Token Prediction heads."""


@dataclass(frozen=True)
class ConversionArgs:
    """Conversion"""

    model: str = ""
    """--to_hf: a run's output_dir (newest checkpoint) or a checkpoint-N. --to_mcore: a Hugging Face model, as for
    megatron sft."""
    output_dir: str = ""
    """Directory to write; it must not exist or be empty."""
    to_hf: bool = False
    """Write Hugging Face safetensors, config and tokenizer, MTP heads included."""
    to_mcore: bool = False
    """Write a megatron-core distributed checkpoint, as a run's checkpoints are; `export --to_hf` turns it back."""
    mtp: Literal["keep", "strip"] = "keep"
    """keep: the export has exactly the heads that were trained. strip: no heads, and a config that promises none."""
    mtp_graft_from: str | None = None
    """A Hugging Face model whose MTP heads the result gets instead, as in megatron sft."""
    draft_vocab: PositiveInt | None = None
    """With --to_hf: tokens that the heads can draft: so many, those that the answers of the run's --dataset hold most
    often. Engines then compute no other logits of theirs. Unset: as the run has them."""
    torch_dtype: Literal["bfloat16", "float32"] | None = None
    """Precision of the exported tensors; those that a model of 16 bits has in float32, such as a router's bias, get no
    less than the source model has. Unset: each tensor's precision in the source model."""
    merge_lora: bool = True
    """true: adapters (LoRA) are added to the weights, and the result is a model like any other. false: with --to_hf,
    the adapters alone, in a directory that PEFT reads, and MTP heads in a file beside them."""
    max_shard_size_gb: PositiveFloat = 5.0
    """Largest safetensors file, in GB (1e9 bytes)."""
    val_dataset: list[str] = field(default_factory=list)
    """Files or datasets of the hub with rows for the next two options."""
    min_acceptance: Fraction | None = None
    """Refuse an export whose heads agree with its trunk on a smaller share of those rows (mean over depths, 0 to 1)."""
    max_regression: Fraction | None = None
    """Refuse an export whose share is lower than that of --baseline by more than this (0 to 1)."""
    baseline: str | None = None
    """The Hugging Face model for --max_regression. Unset: the one that the run began with."""
    force: bool = False
    """Write the export although the two options refuse it; say so."""
    push_to_hub: str | None = None
    """With --to_hf: repository of the hub (ORG/NAME) to which the export is uploaded, with a model card, once it is
    complete and audited."""
    hub_private_repo: bool = True
    """Whether a repository that --push_to_hub makes is private; one that is there stays as it is."""


@dataclass(frozen=True)
class ExportArgs(fields.TimeoutArgs, fields.ParallelLayout, ConversionArgs):
    """Turn a run or checkpoint into a Hugging Face model (--to_hf), or a Hugging Face model into one (--to_mcore)."""


@dataclass(frozen=True)
class InferArgs(
    fields.AnswerArgs,
    fields.AdapterArgs,
    fields.GenerationArgs,
    fields.SglangArgs,
    fields.VllmArgs,
    fields.SpeculationArgs,
    fields.EngineArgs,
    fields.ModelArgs,
):
    """Generate with an engine, MTP heads drafting, and report how many drafts were accepted."""


@dataclass(frozen=True)
class RegenerateArgs(
    fields.GenerationArgs,
    fields.SglangArgs,
    fields.VllmArgs,
    fields.SpeculationArgs,
    fields.EngineArgs,
    fields.RegenerationArgs,
    fields.ModelArgs,
):
    """Answer the rows of a dataset anew with the model itself: the data that its heads learn best from."""


GenerationCommand = InferArgs | RegenerateArgs
"""The commands that ask an engine for answers."""


@dataclass(frozen=True)
class DeployArgs(
    fields.SglangArgs,
    fields.VllmArgs,
    fields.SpeculationArgs,
    fields.ServerArgs,
    fields.AdapterArgs,
    fields.ModelArgs,
):
    """Serve a Hugging Face model with an engine's own OpenAI-compatible server, MTP heads drafting."""


@dataclass(frozen=True)
class BenchArgs(fields.VllmArgs, fields.BenchmarkArgs, fields.ModelArgs):
    """Measure an engine's server with and without drafts at each concurrency, and say how many tokens to draft."""


def deploy_args(args: BenchArgs, num_speculative_tokens: int) -> DeployArgs:
    """The options by which `deploy` starts the server that `bench` measures."""
    drafts = num_speculative_tokens > 0
    given = args.vllm_speculative_config
    config = {**given, "num_speculative_tokens": num_speculative_tokens} if given is not None and drafts else None
    return DeployArgs(
        model=args.model,
        torch_dtype=args.torch_dtype,
        trust_remote_code=args.trust_remote_code,
        infer_backend=args.infer_backend,
        speculative="mtp" if drafts else "none",
        num_speculative_tokens=num_speculative_tokens if drafts and config is None else None,
        max_model_len=args.max_model_len,
        vllm_engine_kwargs=args.vllm_engine_kwargs,
        vllm_speculative_config=config,
        sglang_engine_kwargs=args.sglang_engine_kwargs,
    )


@dataclass(frozen=True)
class EvaluateArgs(fields.SpeculationArgs, fields.EvaluationArgs, fields.ModelArgs):
    """Measure how often MTP heads are right, by depth and channel: against the trunk, and by an engine's counters."""


@dataclass(frozen=True)
class ExaminationArgs:
    """Examination"""

    model: str | None = None
    """A Hugging Face model, as for megatron sft, to audit: shards, index, MTP depth, config. With --plan config.json is
    enough."""
    engine: str | None = None
    """Also run this engine's own configuration and weight loaders on --model, without starting it: what stays random,
    what is never read, which class drafts with how many heads. Where SGLang is not installed, what is known of its
    classes."""
    trust_remote_code: bool = False
    """With --engine: allow Python files that come with the model to run."""
    plan: bool = False
    """Print what training --model would need on each rank, and whether it fits, instead; the options below say how."""
    num_gpus: PositiveInt | None = None
    """GPUs of the run. Unset: as few as the layout allows."""
    gpu_type: str | None = None
    """Rank the layouts that fit on --num_gpus of these, such as H100, by their estimated speed; what is given of the
    layout stays. Unset: only what is given is planned."""
    global_batch_size: PositiveInt | None = None
    """With --gpu_type: samples per optimizer step. Unset: 16."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of one GPU, in GB (1e9 bytes). Unset: that of --gpu_type, or 80."""
    torch_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the planned run's parameters, as megatron sft has it, or of the engine's."""
    loss_type: fields.PreferenceLoss | None = None
    """With --plan: plan a run of megatron dpo with this loss, and its reference model. Unset: one of megatron sft."""


@dataclass(frozen=True)
class DoctorArgs(
    fields.RecomputeArgs,
    fields.PrecisionArgs,
    fields.MicroBatchArgs,
    fields.OptimizerShareArgs,
    fields.ParallelLayout,
    fields.ReferenceModelArgs,
    fields.RowLengthArgs,
    fields.AdapterShapeArgs,
    fields.HeadShapeArgs,
    fields.VllmArgs,
    fields.SpeculationArgs,
    ExaminationArgs,
):
    """Tell what is installed and needed, whether a model keeps its promises, to an engine too, what fits (--plan)."""


@dataclass(frozen=True)
class ComparisonArgs:
    """Runs"""

    runs: list[str] = field(default_factory=list)
    """Directories of runs (--output_dir of megatron sft), finished or not. The flag may be left out before them."""
    output: str | None = None
    """HTML file to write. Unset: run_report.html in the run; of several runs, runs.html here."""


@dataclass(frozen=True)
class ReportArgs(ComparisonArgs):
    """Make the page of a run again, or compare several on one page: figures, differing options, curves."""
