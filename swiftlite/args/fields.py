"""Groups of options, one idea each. The string under a field is its `--help` and its line in docs/options.

A command's class (see `commands.py`) is a composition of these groups. Frozen: nothing after parsing may rewrite
an answer the user gave; what follows from the answers is a `Plan`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from swiftlite.args import bounds

MtpInit = Literal["checkpoint", "random", "copy_last_layer", "fit_last_layer", "graft"]
MtpMode = Literal["joint", "heads_only"]
MtpLoss = Literal["ce", "kl", "tv", "nla", "lk_hybrid"]
TransformerImpl = Literal["local", "transformer_engine"]
MtpTuner = Literal["full", "lora", "frozen"]
TunerType = Literal["full", "lora"]
PreferenceLoss = Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "simpo", "orpo", "kto"]
TruncationStrategy = Literal["delete", "left", "right", "split", "error"]
WeightTransport = Literal["file", "nccl", "ipc"]


@dataclass(frozen=True)
class ModelArgs:
    """Model"""

    model: str = ""
    """A Hugging Face model: a directory (config.json, safetensors, tokenizer), a name of the hub (ORG/NAME or
    ORG/NAME@REVISION), or a GGUF file."""
    torch_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of the parameters in the forward pass. With bfloat16, optimizer state and main weights are float32."""
    trust_remote_code: bool = False
    """Allow Python files that come with the model or its tokenizer to run."""


@dataclass(frozen=True)
class HeadShapeArgs:
    """Multi-Token Prediction"""

    mtp_num_layers: bounds.NonNegativeInt | None = None
    """MTP depth: layers that predict tokens 2, 3, ... ahead. Unset: what the checkpoint has; with heads_only at
    least 1. 0: drop the heads."""
    mtp_mode: MtpMode = "joint"
    """joint: trunk and heads train together. heads_only: only MTP tensors change, proven by hash in the run report."""
    mtp_unroll: bounds.PositiveInt = 1
    """Tokens that the one MTP layer learns to draft, as engines run it: from the second on, it goes on from its own
    state. `infer` drafts as many."""
    draft_vocab: bounds.NonNegativeInt | None = None
    """Tokens that the heads can draft: so many, those that the answers of --dataset hold most often. Heads then compute
    no other logits, in training and in engines. 0: the whole vocabulary. Unset: as the checkpoint has it."""


@dataclass(frozen=True)
class MtpArgs(HeadShapeArgs):
    """Multi-Token Prediction"""

    mtp_init: MtpInit | None = None
    """Where MTP weights come from: the checkpoint, random numbers, a copy of the last decoder layer, the same behind a
    projection that is fitted to some training rows (fit_last_layer), or the model that --mtp_graft_from names. Unset:
    the checkpoint; with heads_only where it has no heads, fit_last_layer."""
    mtp_graft_from: str | None = None
    """With --mtp_init graft: a Hugging Face model, as for --model, whose MTP heads are taken over, such as the one that
    the trunk was fine-tuned from. Same family and shapes."""
    mtp_loss_scaling_factor: bounds.PositiveFloat = 0.1
    """Weight of the MTP loss (mean over depths) beside the main loss."""
    mtp_loss: MtpLoss | None = None
    """What heads learn. ce: the data's tokens. The others: the trunk's own distribution of them. kl: by KL(trunk ||
    head). tv: by the share of drafts, drawn at temperature 1, that rejection sampling rejects. nla: by -log of the
    share that it accepts. lk_hybrid: kl where that share is small, and ever more tv as it grows. Unset: kl with
    heads_only, else ce."""
    mtp_clip_grad: bounds.NonNegativeFloat | None = None
    """Largest norm of the MTP layers' gradients, which are then clipped apart from the trunk's; --clip_grad is the
    trunk's alone. 0 does not clip them. Unset: one norm over both."""
    cache_trunk_states: str | None = None
    """Directory for the trunk's states, with heads_only: the first epoch writes them, later epochs and later runs over
    the same rows read them. Its size is logged before the first step."""
    draft_for: str | None = None
    """Engine that the heads are trained for: they are fed what it feeds them, which differs for MiMo, DeepSeek-V3, GLM
    and HY-V3. Unset: as the checkpoint says, else vllm."""
    mtp_unroll_beta: bounds.PositiveFraction = 0.6
    """With --mtp_unroll: weight of each drafted token's loss, relative to the one before."""


@dataclass(frozen=True)
class AdapterShapeArgs:
    """Low-rank adapters (LoRA)"""

    tuner_type: TunerType = "full"
    """full: the parameters of the model learn. lora: they stay, and adapters beside its linear layers learn."""
    lora_rank: bounds.PositiveInt = 8
    """Rank of the adapters."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get adapters, by their names in Hugging Face's files as PEFT takes them: q_proj, k_proj,
    v_proj, o_proj, gate_proj, up_proj, down_proj, ... all-linear: all of them, experts too, but for the output
    layer."""
    lora_modules_to_save: list[str] = field(default_factory=list)
    """Modules of the trunk that learn in full beside the adapters: embed_tokens, lm_head, norm, input_layernorm, ..."""
    use_dora: bool = False
    """Learn the length of each row of a weight beside its direction (DoRA), of every layer that gets an adapter."""
    mtp_tuner: MtpTuner | None = None
    """How MTP heads learn beside adapters. full: all of their parameters. lora: adapters of their own. frozen: not at
    all. Unset: lora where somebody has trained them before, full where they start anew."""


@dataclass(frozen=True)
class LoraArgs(AdapterShapeArgs):
    """Low-rank adapters (LoRA)"""

    lora_alpha: bounds.PositiveFloat = 32.0
    """Weight of the adapters: what they compute is multiplied by this number / --lora_rank."""
    lora_dropout: bounds.ProperFraction = 0.0
    """Share of the numbers an adapter takes in that are zero in training."""
    use_rslora: bool = False
    """Divide --lora_alpha by the root of --lora_rank (rank-stabilised LoRA), not by the rank."""


@dataclass(frozen=True)
class AdapterArgs:
    """Adapters"""

    adapters: str | None = None
    """Directory of adapters (LoRA) of --model, from export --merge_lora false or PEFT. infer adds them to its weights
    in a temporary copy, which the engine then loads; deploy has vLLM serve them beside the model, to requests that name
    the directory as theirs."""


@dataclass(frozen=True)
class RowLengthArgs:
    """Data"""

    max_length: bounds.Length = 2048
    """Longest sample in tokens; longer ones follow --truncation_strategy."""


@dataclass(frozen=True)
class DataArgs(RowLengthArgs):
    """Data"""

    dataset: list[str] = field(default_factory=list)
    """Files (.jsonl, .json, .parquet, .csv, .txt) or datasets of the hub (ORG/NAME:SUBSET/SPLIT@REVISION; ORG/NAME is
    the split train of main). #500 behind one takes a random sample of 500 rows. Several are mixed."""
    val_dataset: list[str] = field(default_factory=list)
    """Held-out files or datasets of the hub. Unset: split from --dataset by --split_dataset_ratio."""
    split_dataset_ratio: bounds.ProperFraction = 0.05
    """Part of --dataset held out for evaluation when --val_dataset is not given; 0 holds out nothing."""
    truncation_strategy: TruncationStrategy = "delete"
    """What happens to samples over --max_length: delete them, cut left, cut right, or stop with an error. split is for
    megatron pt."""
    max_bad_rows: bounds.NonNegativeInt = 0
    """Rows that may be malformed before the run stops; each is named by file:line and counted in the run report."""
    loss_scale: Literal["default", "last_round", "all"] = "default"
    """Which tokens train: every assistant turn (default), those after the last user turn, or all tokens."""
    system: str | None = None
    """System prompt for rows that bring none."""
    dataset_shuffle: bool = True
    """Shuffle the training rows anew in every epoch."""
    dataset_num_proc: bounds.PositiveInt = 1
    """Processes that tokenize the dataset."""


@dataclass(frozen=True)
class PackingArgs:
    """Packing and streaming"""

    packing: bool = False
    """Put whole samples one behind the other into rows of --packing_length tokens; none sees another. Batch sizes then
    count rows."""
    packing_length: bounds.Length | None = None
    """Most tokens of a packed row. Unset: --max_length."""
    padding_free: bool = False
    """Put the samples of each micro-batch one behind the other, instead of padding them to the longest."""
    sequence_packing_scheduler: Literal["none", "dp_balanced"] = "none"
    """dp_balanced: with --packing, pack the samples of each step anew, so that all data-parallel ranks have as much
    work; --global_batch_size then counts samples, and micro-batches are as many as are needed."""
    streaming: bool = False
    """Read, tokenize and pack while training goes on, in the order of the files, a share of the rows on each
    data-parallel rank; needs --packing and --train_iters."""
    interleave_prob: list[float] = field(default_factory=list)
    """Shares of the rows that come from each of several --dataset, such as 0.7 0.3. Unset: all rows of all of them. An
    epoch ends with the first file that has no more rows; with --streaming each file begins again."""
    streaming_buffer_size: bounds.PositiveInt = 1000
    """Samples among which --streaming looks for those that share a row."""
    sft_mock_dataset_config_json: dict[str, Any] | None = None
    """JSON: train on random tokens of given lengths instead of --dataset, for benchmarks; see docs/en/packing.md."""


@dataclass(frozen=True)
class DocumentArgs:
    """Documents"""

    append_eos: bool = True
    """End each document with the tokenizer's eos token, so that the model learns where texts end."""
    truncation_strategy: TruncationStrategy = "split"
    """What happens to documents over --max_length: split them into pieces that all train, delete them, cut left, cut
    right, or stop with an error."""
    packing: bool = True
    """Put documents, and pieces of long ones, one behind the other into rows of --packing_length tokens; none sees
    another. Batch sizes then count rows."""


@dataclass(frozen=True)
class ReferenceModelArgs:
    """Preferences"""

    ref_model: str | None = None
    """A Hugging Face model, as for --model, that answers are compared with. Unset: --model as it is before the first
    step."""
    ref_tensor_model_parallel_size: bounds.PositiveInt | None = None
    """Ranks that share each matrix of the reference model. Unset: as --tensor_model_parallel_size."""
    ref_pipeline_model_parallel_size: bounds.PositiveInt | None = None
    """Stages of the reference model. Unset: as --pipeline_model_parallel_size."""


@dataclass(frozen=True)
class PreferenceArgs(ReferenceModelArgs):
    """Preferences"""

    loss_type: PreferenceLoss = "sigmoid"
    """What a pair of answers adds to the loss, by TRL's names. sigmoid: DPO. hinge, ipo, robust, apo_zero, apo_down:
    its relatives. simpo, orpo: without a reference model; simpo as TRL's CPO has it. kto: single answers, each of which
    is good or bad."""
    beta: bounds.PositiveFloat = 0.1
    """Weight of the distance from the reference model; with ipo the paper's tau, with orpo its lambda."""
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    """With sigmoid, robust and simpo: share of the pairs that are taken to be the wrong way round; below 0.5."""
    simpo_gamma: bounds.NonNegativeFloat = 0.5
    """With simpo: margin by which beta times the log-probability per token is to be larger for preferred answers."""
    cpo_alpha: bounds.NonNegativeFloat = 1.0
    """With simpo: weight of the next-token loss on the preferred answers; the SimPO paper has none, which is 0."""
    desirable_weight: bounds.NonNegativeFloat = 1.0
    """With kto: weight of the loss of good answers."""
    undesirable_weight: bounds.NonNegativeFloat = 1.0
    """With kto: weight of the loss of bad answers."""
    ref_logprobs_cache: str | None = None
    """Directory for what the reference model says of the pairs; later runs over the same pairs read it. Unset:
    OUTPUT_DIR/reference."""


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel layout"""

    tensor_model_parallel_size: bounds.PositiveInt = 1
    """Ranks that share each matrix."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks also share the activations between matrices, by position in the row."""
    pipeline_model_parallel_size: bounds.PositiveInt = 1
    """Stages that the layers are cut into, one rank after the other."""
    num_virtual_stages_per_pipeline_rank: bounds.PositiveInt | None = None
    """Stages on each pipeline rank, interleaved, for a shorter pipeline bubble. Unset: one."""
    pipeline_model_parallel_layout: str | None = None
    """What each stage holds, stages apart by |: E embedding, t decoder layer, m MTP layer, L loss; *N repeats, as in
    'Et*3|t*4|t*3mL'. Unset: layers are shared evenly, the MTP layers stand on the last stage."""
    decoder_first_pipeline_num_layers: bounds.PositiveInt | None = None
    """Decoder layers of the first stage. Unset: an even share."""
    decoder_last_pipeline_num_layers: bounds.PositiveInt | None = None
    """Decoder layers of the last stage. Unset: an even share."""
    context_parallel_size: bounds.PositiveInt = 1
    """Ranks that share each row by position, for long rows."""
    expert_model_parallel_size: bounds.PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor_parallel_size: bounds.PositiveInt = 1
    """Ranks that share each expert's matrices."""


@dataclass(frozen=True)
class OptimizerShareArgs:
    """Distributed optimizer and communication"""

    use_distributed_optimizer: bool | None = None
    """Data-parallel ranks share the optimizer state instead of each holding all of it. Unset, here and below: on GPUs,
    where there are such ranks."""


@dataclass(frozen=True)
class TimeoutArgs:
    """Distributed optimizer and communication"""

    distributed_timeout_minutes: bounds.PositiveInt = 10
    """Longest wait of one rank for another before the run ends with an error."""


@dataclass(frozen=True)
class DistributedArgs(OptimizerShareArgs, TimeoutArgs):
    """Distributed optimizer and communication"""

    overlap_grad_reduce: bool | None = None
    """Sum gradients over data-parallel ranks while the backward pass still runs."""
    overlap_param_gather: bool | None = None
    """Gather updated parameters while the forward pass already runs; needs the two options above."""


@dataclass(frozen=True)
class PrecisionArgs:
    """Kernels"""

    transformer_impl: TransformerImpl = "local"
    """Whose linear layers and norms: torch's (local) or, on NVIDIA GPUs, Transformer Engine's. Checkpoints are the
    same."""
    fused_kernels: Literal["auto", "none"] = "auto"
    """auto: on GPUs norms and activations are one kernel each, and losses never hold all logits. none: everything
    rounds where transformers does."""
    fp8_format: Literal["none", "e4m3", "hybrid"] = "none"
    """Train with linear layers and experts whose products are of 8 bits, on GPUs that have them. hybrid: gradients in
    e5m2, all else in e4m3. Needs --transformer_impl transformer_engine. What is saved and exported is not of 8 bits."""
    fp8_recipe: Literal["tensorwise", "blockwise", "mxfp8"] | None = None
    """Which numbers share a scale: those of a tensor, blocks of 128, or blocks of 32 (Blackwell). Default:
    blockwise."""
    fp4_format: Literal["none", "e2m1"] = "none"
    """As --fp8_format, with products of 4 bits (NVFP4, Blackwell)."""
    num_layers_at_start_in_bf16: bounds.NonNegativeInt = 1
    """With --fp8_format or --fp4_format: the first decoder layers that stay in bfloat16."""
    num_layers_at_end_in_bf16: bounds.NonNegativeInt = 1
    """With --fp8_format or --fp4_format: the last decoder layers that stay in bfloat16."""


@dataclass(frozen=True)
class KernelArgs(PrecisionArgs):
    """Kernels"""

    attention_backend: Literal["auto", "sdpa", "flash", "flash3", "flash4", "te"] = "auto"
    """sdpa: torch's, a call for each sequence. flash: one call for all sequences of a packed row, of flash-attn if it
    is installed, else of torch. flash3, flash4: torch's over the kernels of flash-attn 3 (Hopper) or 4 (Hopper,
    Blackwell), which must be installed. te: Transformer Engine's. auto: on GPUs in bfloat16 flash, where it is
    there."""
    deterministic_mode: bool = False
    """On GPUs too, the same options make the same bits in every run, more slowly: sums are made in one order. What
    torch has no such way for ends the run. A CPU computes so anyway."""


@dataclass(frozen=True)
class RecomputeArgs:
    """Activation recomputation"""

    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again instead of keeping: nothing, some modules of each layer, or whole layers
    (MTP layers too)."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """With full: uniform keeps the input of every N layers, block recomputes only the first N layers of a stage."""
    recompute_num_layers: bounds.PositiveInt = 1
    """N of --recompute_method."""
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """With selective: core_attn, mlp, moe, mla_up_proj."""
    distribute_saved_activations: bool = False
    """With full: tensor-parallel ranks share what is kept; not with --sequence_parallel."""


@dataclass(frozen=True)
class MoeArgs:
    """Mixture of experts"""

    moe_aux_loss_coeff: bounds.NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of routers that have one."""
    moe_router_bias_update_rate: bounds.NonNegativeFloat = 0.0
    """Step by which a router's expert bias moves after each optimizer step to level the load; 0 keeps it."""


@dataclass(frozen=True)
class MicroBatchArgs:
    """Batches, optimizer and schedule"""

    micro_batch_size: bounds.PositiveInt = 1
    """Samples per forward pass on one rank."""


@dataclass(frozen=True)
class OptimArgs(MicroBatchArgs):
    """Batches, optimizer and schedule"""

    global_batch_size: bounds.PositiveInt = 16
    """Samples per optimizer step over all ranks; gradients accumulate as needed."""
    num_train_epochs: bounds.PositiveFloat = 1.0
    """Passes over the training rows; not used when --train_iters is given."""
    train_iters: bounds.PositiveInt | None = None
    """Optimizer steps; overrides --num_train_epochs."""
    lr: bounds.PositiveFloat | None = None
    """Peak learning rate. Unset: 1e-5, in megatron dpo 1e-6; 1e-4 with --tuner_type lora; with --mtp_mode heads_only
    1e-3 where the heads start anew, 3e-4 where they are grafted."""
    min_lr: bounds.NonNegativeFloat | None = None
    """Learning rate at the end of the decay. Unset: a tenth of --lr."""
    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning-rate decay."""
    lr_warmup_fraction: bounds.Fraction = 0.05
    """Part of the steps over which the learning rate rises linearly from 0."""
    weight_decay: bounds.NonNegativeFloat = 0.1
    """AdamW weight decay; biases and norms are left out."""
    adam_beta1: bounds.ProperFraction = 0.9
    """AdamW beta1."""
    adam_beta2: bounds.ProperFraction = 0.95
    """AdamW beta2."""
    adam_eps: bounds.PositiveFloat = 1e-8
    """AdamW epsilon."""
    clip_grad: bounds.NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off. See also --mtp_clip_grad."""
    seed: bounds.Seed = 42
    """Seed of data order, splits, random initialisation and dropout."""


@dataclass(frozen=True)
class RunArgs:
    """Run: saving, evaluating, resuming"""

    output_dir: str = ""
    """Where checkpoints, metrics and reports go."""
    resume: bool = False
    """Go on from the newest complete checkpoint in --output_dir, at the same layout bit for bit; without one, start."""
    save_steps: bounds.PositiveInt = 500
    """Steps between checkpoints; one more is written at the end."""
    async_save: bool = False
    """Write checkpoints in a process of its own while training goes on."""
    save_total_limit: bounds.PositiveInt | None = None
    """Newest checkpoints to keep. Unset: all."""
    eval_steps: bounds.PositiveInt | None = None
    """Steps between evaluations on the held-out rows. Unset: as --save_steps."""
    eval_iters: bounds.PositiveInt | None = None
    """Global batches per evaluation. Unset: all held-out rows."""
    logging_steps: bounds.PositiveInt = 1
    """Steps between lines of metrics.jsonl, and between points of --report_to."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Where metrics go beside metrics.jsonl: tensorboard (files in OUTPUT_DIR/tensorboard, where that package is
    installed), wandb, swanlab, mlflow, through packages of their own; none: nowhere."""
    acceptance_samples: bounds.NonNegativeInt = 16
    """Held-out prompts that the model continues greedily, before and after training, to measure how many drafted tokens
    it would accept; written to acceptance.json. 0 leaves this out."""
    acceptance_max_new_tokens: bounds.PositiveInt = 64
    """Tokens generated per prompt for --acceptance_samples."""
    dry_run: bool = False
    """Print the resolved plan and stop before any weight is read."""


@dataclass(frozen=True)
class EngineArgs:
    """Engine"""

    infer_backend: str = "transformers"
    """Engine that generates."""
    speculative: Literal["none", "mtp"] = "none"
    """mtp: the checkpoint's own heads draft tokens, the trunk verifies them."""
    draft_confidence: bounds.Fraction | None = None
    """Draft nothing more in a step behind a draft that its head gives a smaller probability; what is written stays the
    same. `swiftlite evaluate` measures which one is fastest. Unset: always --num_speculative_tokens."""


@dataclass(frozen=True)
class SpeculationArgs:
    """Speculation"""

    num_speculative_tokens: bounds.PositiveInt | None = None
    """Tokens drafted per step. Unset: as many as the heads were trained for (their depth, or --mtp_unroll)."""


@dataclass(frozen=True)
class VllmArgs:
    """Options of vLLM"""

    vllm_engine_kwargs: dict[str, Any] | None = None
    """JSON: keyword arguments for vLLM's engine, on top of what swiftlite sets; null removes one."""
    vllm_speculative_config: dict[str, Any] | None = None
    """JSON: vLLM's speculative_config, whole. Unset: built from the checkpoint."""


@dataclass(frozen=True)
class SglangArgs:
    """Options of SGLang"""

    sglang_engine_kwargs: dict[str, Any] | None = None
    """JSON: options of SGLang's engine by their names with underscores, on top of what swiftlite sets; null removes
    one."""
    sglang_speculative_algorithm: Literal["NEXTN", "EAGLE"] | None = None
    """Algorithm that drafts with MTP heads; both are the same to SGLang. Unset: NEXTN."""
    sglang_speculative_num_steps: bounds.PositiveInt | None = None
    """Tokens that the heads draft one after the other. The three numbers go together; unset: from the checkpoint."""
    sglang_speculative_eagle_topk: bounds.PositiveInt | None = None
    """Branches at each drafted token. Unset: 1, a chain."""
    sglang_speculative_num_draft_tokens: Annotated[int, Interval(ge=2)] | None = None
    """Tokens verified at once, the newest one included; of a chain, one more than its steps."""


@dataclass(frozen=True)
class ServerArgs:
    """Server"""

    infer_backend: str = "vllm"
    """Engine whose own OpenAI-compatible server is started."""
    speculative: Literal["none", "mtp"] | None = None
    """mtp: the checkpoint's own heads draft tokens, the trunk verifies them. Unset: mtp when there are heads."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: bounds.Port = 8000
    """Port to listen on."""
    draft_schedule: str | None = None
    """The bench.json of `swiftlite bench`: tokens drafted per step change with the requests under way, as measured
    there."""
    max_model_len: bounds.Length | None = None
    """Longest prompt plus answer. Unset: the model's own limit."""
    live_weights: bool = False
    """Take new weights while serving, from a trainer. Whoever reaches the port may then replace the
    weights and pause the server: keep --host at this machine, or give an api_key."""
    weight_transport: WeightTransport = "file"
    """How they come, with --live_weights. file: through the temporary directory of this machine; nccl: from GPU to GPU,
    also between machines; ipc: within the GPU that trainer and server share."""
    dry_run: bool = False
    """Print the command that would be started, ready to paste, and start nothing."""


@dataclass(frozen=True)
class EvaluationArgs:
    """Evaluation"""

    dataset: list[str] = field(default_factory=list)
    """Files or datasets of the hub (as for sft) with answers that the model was not trained on; their channels are told
    apart."""
    baseline: str | None = None
    """A Hugging Face model, as for --model, to compare with, such as the one before training."""
    output_dir: str = ""
    """Directory for evaluation.json, evaluation.svg and evaluation.html; it may exist."""
    infer_backend: str = "none"
    """An engine that generates answers to the prompts, whose own counters are read; none: teacher-forced alone."""
    max_prompts: bounds.PositiveInt = 64
    """Prompts of each channel that the engine gets."""
    max_new_tokens: bounds.PositiveInt = 64
    """Longest answer in tokens."""
    temperature: bounds.NonNegativeFloat = 0.0
    """Above 0, the engine also draws answers at this temperature; what it then accepts stands beside what it accepts
    greedily."""
    draft_confidence: list[float] = field(default_factory=list)
    """Values of infer's option of this name, such as 0,0.2,0.4,0.6: the engine answers with each, and a table says how
    fast it was."""
    max_length: bounds.Length = 2048
    """Longest row in tokens; longer ones are cut right."""
    max_bad_rows: bounds.NonNegativeInt = 0
    """Rows that may be malformed before the command stops; each is named by file:line."""
    system: str | None = None
    """System prompt for rows that bring none."""


@dataclass(frozen=True)
class BenchmarkArgs:
    """Benchmark"""

    val_dataset: list[str] = field(default_factory=list)
    """Files or datasets of the hub with prompts (rows as for sft; the last assistant turn is left out)."""
    output_dir: str = ""
    """Directory for bench.json, bench.svg, bench.html and the servers' logs; it may exist."""
    infer_backend: str = "vllm"
    """Engine whose server is measured, as `deploy` starts it."""
    num_speculative_tokens: list[int] = field(default_factory=lambda: [0, 1, 2, 3])
    """Tokens to draft per step, a server for each; 0 drafts nothing and must be among them."""
    concurrency: list[int] = field(default_factory=lambda: [1, 8, 32])
    """Requests that are under way at once."""
    rounds: bounds.PositiveInt = 5
    """Times that every prompt is sent at each concurrency; more tell a small gain from noise."""
    repeat_prompts: bool = False
    """Let rounds share one cache of prefixes, as where the same prompts come again: the table says how much of them
    came from it, with drafts and without."""
    max_prompts: bounds.PositiveInt = 64
    """Prompts of the files that are sent, the first ones."""
    max_new_tokens: bounds.PositiveInt = 128
    """Longest answer in tokens."""
    temperature: bounds.NonNegativeFloat = 0.0
    """Of all requests. Above 0 answers are drawn, so that they are not compared."""
    max_model_len: bounds.Length | None = None
    """Longest prompt plus answer. Unset: the model's own limit."""
    system: str | None = None
    """System prompt for rows that bring none."""
    sglang_engine_kwargs: dict[str, Any] | None = None
    """JSON: options of SGLang's server by their names with underscores, on top of what swiftlite sets; null removes
    one."""


@dataclass(frozen=True)
class GenerationArgs:
    """Generation"""

    max_new_tokens: bounds.PositiveInt = 256
    """Longest answer in tokens."""
    temperature: bounds.NonNegativeFloat = 0.0
    """0 is greedy. Above 0 tokens are drawn, and with --speculative the heads' drafts too; what is written has the
    trunk's distribution all the same. SGLang on a CPU cannot verify such drafts and rejects it."""
    top_p: bounds.PositiveFraction = 1.0
    """Nucleus sampling: smallest set of tokens whose probability reaches this."""
    max_batch_size: bounds.PositiveInt = 32
    """Prompts that vLLM or SGLang serves at once."""
    max_model_len: bounds.Length | None = None
    """Longest prompt plus answer. Unset: what the prompts need, within the model's limit."""
    system: str | None = None
    """System prompt for rows and chats that bring none."""
    seed: bounds.Seed = 42
    """Seed for sampling."""


@dataclass(frozen=True)
class AnswerArgs:
    """Prompts and answers"""

    val_dataset: list[str] = field(default_factory=list)
    """Files or datasets of the hub with prompts (rows as for sft; the last assistant turn is left out). Unset: chat on
    stdin."""
    result_path: str | None = None
    """JSON-lines file for the answers, each as it is finished; the same command goes on. Unset: stdout."""
    compare: bool = False
    """Run the same prompts without speculation too; print the speed-up and, at temperature 0, whether the answers are
    equal."""
    acceptance_json: str | None = None
    """An acceptance.json of a run: add this engine's measured acceptance, at each temperature apart, beside the run's
    own."""


@dataclass(frozen=True)
class RegenerationArgs:
    """Rows and their new answers"""

    dataset: list[str] = field(default_factory=list)
    """Files or datasets of the hub (as for sft) whose assistant's turns the model answers anew; FILE#500 takes a random
    sample."""
    output_dir: str = ""
    """Directory for dataset.jsonl, report.json and the answers so far; the same command goes on with those."""
    num_answers: bounds.PositiveInt = 1
    """Answers to each prompt; equal ones are kept once."""
    gold_fraction: bounds.ProperFraction = 0.0
    """Part of the rows of dataset.jsonl that are rows of --dataset as they are, drawn at random; below 1."""
    drop_truncated: bool = False
    """Leave out answers that were cut at --max_new_tokens, and the turns behind them."""
    max_bad_rows: bounds.NonNegativeInt = 0
    """Rows that may be malformed before the command stops; each is named by file:line."""
