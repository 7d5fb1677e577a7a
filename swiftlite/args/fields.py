"""Groups of related options. The string under a field is its help text in `--help` and in docs/options.

The options class of a command (see `commands.py`) combines these groups. The classes are frozen, so that options never
change after parsing. Values that are derived from options are in the `Plan`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from swiftlite.args import bounds

MtpInit = Literal["checkpoint", "random", "copy_last_layer", "fit_last_layer", "graft"]
IndexerMode = Literal["frozen", "joint", "indexer_only"]
MtpMode = Literal["joint", "heads_only"]
MtpLoss = Literal["ce", "kl", "tv", "nla", "lk_hybrid"]
TransformerImpl = Literal["local", "transformer_engine"]
MtpTuner = Literal["full", "lora", "frozen"]
TunerType = Literal["full", "lora"]
PreferenceLoss = Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down", "simpo", "orpo", "kto"]
TruncationStrategy = Literal["delete", "left", "right", "split", "error"]
WeightTransport = Literal["file", "nccl", "ipc"]
OptimizerName = Literal["adamw", "adamw_8bit", "muon"]
LrDecayStyle = Literal["cosine", "linear", "constant", "inverse-square-root", "WSD"]
WsdDecayStyle = Literal["cosine", "linear", "minus_sqrt", "exponential"]
ProfileKind = Literal["torch", "nsys", "memory"]


@dataclass(frozen=True)
class ModelArgs:
    """Model"""

    model: str = ""
    """A Hugging Face model: a directory (config.json, safetensors, tokenizer), a name on the hub (ORG/NAME or
    ORG/NAME@REVISION), or a GGUF file."""
    torch_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the parameters in the forward pass. With bfloat16, the main weights in the optimizer are
    float32."""
    trust_remote_code: bool = False
    """Allow running Python files from the directory of the model or tokenizer."""
    chat_template_kwargs: dict[str, Any] | None = None
    """JSON: values of variables of the chat template, such as {"enable_thinking": false}. Use the same ones in training
    and in the engine. Default: those of the template."""


@dataclass(frozen=True)
class MtpArgs:
    """Multi-Token Prediction"""

    mtp_num_layers: bounds.MtpDepth | None = None
    """Number of MTP layers, which predict tokens 2, 3, ... ahead. Default: the number in the checkpoint; with
    heads_only at least 1. 0 removes the heads."""
    mtp_mode: MtpMode = "joint"
    """joint: train trunk and heads together. heads_only: train the heads on a frozen trunk, which the run report
    verifies by hash."""
    mtp_unroll: bounds.DraftDepth = 1
    """Number of draft tokens that a single MTP layer is trained for, applied to its own state from the second token on,
    as in engines. `infer` drafts this number by default."""
    draft_vocab: bounds.NonNegativeInt | None = None
    """Size of the draft vocabulary: heads draft only the most frequent tokens in the answers of --dataset, and compute
    no other logits, in training and in engines. 0: the whole vocabulary. Default: that of the checkpoint."""
    stream_trunk_gb: bounds.PositiveFloat = 4.0
    """With --stream_trunk: memory of each rank for hidden states that wait between layers, in GB. The trunk is read
    once for each group of rows whose states fit."""
    mtp_init: MtpInit | None = None
    """Initial weights of the heads: checkpoint; random; copy_last_layer: a copy of the last decoder layer;
    fit_last_layer: the same copy with a projection and an MLP fitted to training rows; graft: the heads of
    --mtp_graft_from. Default: checkpoint; with heads_only and no heads in the checkpoint, fit_last_layer."""
    mtp_graft_from: str | None = None
    """With --mtp_init graft: the Hugging Face model, as for --model, whose MTP heads are copied, such as the base model
    of the trunk. Family and shapes must match. Or an assistant of Gemma 4, which is then the drafter."""
    mtp_loss_scaling_factor: bounds.PositiveFloat = 0.1
    """Weight of the MTP loss (mean over depths) relative to the main loss."""
    mtp_loss: MtpLoss | None = None
    """Loss of the heads. ce: cross-entropy with the data. The others compare with the trunk's distribution. kl:
    KL(trunk || head). tv: rejection rate of drafts sampled at temperature 1. nla: -log of the acceptance rate of these
    drafts. lk_hybrid: kl at a low acceptance rate, moving to tv as it grows. Default: kl with heads_only and in
    megatron grpo and gkd, else ce."""
    mtp_clip_grad: bounds.NonNegativeFloat | None = None
    """Maximum gradient norm of the MTP layers, which are then clipped separately; --clip_grad applies to the trunk
    only. 0 disables clipping of the heads. Default: one norm over trunk and heads."""
    cache_trunk_states: str | None = None
    """With heads_only: cache directory for the trunk's hidden states. The first epoch writes them; later epochs and
    later runs over the same rows read them. The size is logged before the first step."""
    stream_trunk: bool = False
    """With --cache_trunk_states: train heads for a trunk that is larger than the memory. Before the first step, its
    decoder layers are read one at a time, and all hidden states are computed. Requires memory for two layers, the
    embedding, the output layer and the heads."""
    drafter: str | None = None
    """With heads_only: train another drafter instead of MTP heads: eagle3, eagle3.1 (normalized features and states,
    for more draft tokens), the block drafter dflash, dspark (a block drafter whose draft tokens depend on the previous
    one), or gemma4_assistant, which reads keys of a Gemma 4. --mtp_unroll is its number of draft tokens. The export
    has it in the folder draft/, from which vLLM drafts without swiftlite's plugin, except for dspark on a CPU. Default:
    the drafter of the checkpoint."""
    drafter_layers: bounds.DrafterDepth | None = None
    """With --drafter dflash or dspark: number of its decoder layers. Published drafters have 5. Default: that of the
    checkpoint, or 1."""
    markov_rank: bounds.MarkovRank | None = None
    """With --drafter dspark: rank of the matrix with which a draft token depends on the previous one. Default: that of
    the checkpoint, or 256."""
    drafter_anchors: bounds.PositiveFraction = 1.0
    """With --drafter dflash or dspark: share of the positions from which a step drafts, in random runs of 64. Fewer
    take less time and memory, so that a drafter sees more rows. An evaluation drafts from all positions."""
    mtp_features: list[int] = field(default_factory=list)
    """With heads_only: numbers of decoder layers whose outputs the MTP head reads in addition to the last state of
    the trunk, counted from 1, such as 15,27 of 30 layers: a middle and a late one. For 20,000 tokens of answers and
    more. The export has the head in the folder draft/. Default: those of the checkpoint, or none."""
    draft_for: str | None = None
    """Engine whose head inputs are used in training; engines differ for MiMo, DeepSeek-V3, GLM and HY-V3. vllm_stock:
    heads of dense models that vLLM runs without swiftlite's plugin, from the folder draft/ of the export. Default: the
    one in the checkpoint's config.json, else vllm."""
    mtp_unroll_beta: bounds.PositiveFraction | None = None
    """With --mtp_unroll: weight of each draft token's loss relative to the previous one. Default: 0.6; with --drafter
    dflash or dspark 0.78."""
    mtp_unroll_weights: Literal["fixed", "joint"] = "fixed"
    """With --mtp_unroll: weights of the draft tokens in the MTP loss. fixed: powers of --mtp_unroll_beta. joint: at
    each position, those with which tv maximizes the expected number of accepted draft tokens at temperature 1."""


@dataclass(frozen=True)
class LoraArgs:
    """Low-rank adapters (LoRA)"""

    tuner_type: TunerType = "full"
    """full: train the model's parameters. lora: freeze them and train adapters on linear layers."""
    lora_rank: bounds.PositiveInt = 8
    """Rank of the adapters."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get adapters, by their names in Hugging Face's files as in PEFT: q_proj, k_proj, v_proj,
    o_proj, gate_proj, up_proj, down_proj, ... all-linear: all linear layers, experts included, except the output layer.
    """
    lora_modules_to_save: list[str] = field(default_factory=list)
    """Modules of the trunk that are trained in full: embed_tokens, lm_head, norm, input_layernorm, ..."""
    use_dora: bool = False
    """Also train the length of each row of adapted weights (DoRA)."""
    mtp_tuner: MtpTuner | None = None
    """How MTP heads are trained with --tuner_type lora. full: all parameters. lora: adapters. frozen: not trained.
    Default: lora for heads of the checkpoint, full for new ones."""
    lora_alpha: bounds.PositiveFloat = 32.0
    """Scale of the adapters: their output is multiplied by this number / --lora_rank."""
    lora_dropout: bounds.ProperFraction = 0.0
    """Share of an adapter's inputs that are zeroed in training."""
    use_rslora: bool = False
    """Divide --lora_alpha by sqrt(--lora_rank) instead of the rank (rank-stabilized LoRA)."""


@dataclass(frozen=True)
class AdapterArgs:
    """Adapters"""

    adapters: str | None = None
    """Directory of LoRA adapters for --model, from export --merge_lora false or PEFT. infer merges them into a
    temporary copy of the model that the engine loads. deploy serves them in vLLM next to the model, for requests that
    name the directory as their model."""


@dataclass(frozen=True)
class DataArgs:
    """Data"""

    max_length: bounds.Length = 2048
    """Maximum length of a sample in tokens; see --truncation_strategy for longer ones."""
    dataset: list[str] = field(default_factory=list)
    """Files (.jsonl, .jsonl.gz, .jsonl.zst, .json, .parquet, .csv, .txt) or datasets on the hub
    (ORG/NAME:SUBSET/SPLIT@REVISION; ORG/NAME means the train split of main). The suffix #500 selects a random sample of
    500 rows. Rows of several datasets are mixed."""
    val_dataset: list[str] = field(default_factory=list)
    """Held-out files or datasets on the hub. Default: a part of --dataset, see --split_dataset_ratio."""
    split_dataset_ratio: bounds.ProperFraction = 0.05
    """Share of --dataset that is held out for evaluation without --val_dataset; 0 holds out nothing."""
    columns: dict[str, str] | None = None
    """JSON: new names of columns of the rows, such as {"problem": "query", "solution": "response"}. Other columns keep
    their names."""
    truncation_strategy: TruncationStrategy = "delete"
    """Treatment of samples longer than --max_length: delete them, truncate left or right, or stop with an error. split
    is for megatron pt."""
    max_bad_rows: bounds.NonNegativeInt = 0
    """Maximum number of malformed rows before the run stops; each is reported with file:line and counted in the run
    report."""
    loss_scale: Literal["default", "last_round", "all"] = "default"
    """Trained tokens: every assistant turn (default), those after the last user turn, or all tokens."""
    system: str | None = None
    """System prompt for rows without one."""
    dataset_shuffle: bool = True
    """Reshuffle the training rows in every epoch."""
    dataset_num_proc: bounds.PositiveInt = 1
    """Number of processes that tokenize the dataset, on each machine."""
    dataset_cache: str | None = None
    """Directory for tokenized rows, which later runs with the same rows, tokenizer and options read. All ranks of a
    machine share its files. Can be deleted between runs. Default: a temporary directory, deleted when the run ends."""


@dataclass(frozen=True)
class ImageFileArgs:
    """Images"""

    media_root: str | None = None
    """Directory of the images that rows name with relative paths; files outside of it are refused. Default: the
    directory of each data file."""


@dataclass(frozen=True)
class ImageArgs(ImageFileArgs):
    """Images"""

    max_pixels: bounds.PositiveInt | None = None
    """Maximum number of pixels of an image; larger images are resized. Default: that of the model's
    preprocessor_config.json."""
    min_pixels: bounds.PositiveInt | None = None
    """Minimum number of pixels of an image; smaller images are resized. Default: that of the model's
    preprocessor_config.json."""


@dataclass(frozen=True)
class PackingArgs:
    """Packing and streaming"""

    packing: bool = False
    """Pack whole samples into rows of --packing_length tokens, without attention between samples. Batch sizes then
    count rows."""
    packing_length: bounds.Length | None = None
    """Maximum length of a packed row in tokens. Default: --max_length."""
    padding_free: bool = False
    """Concatenate the samples of each micro-batch instead of padding them to the longest."""
    sequence_packing_scheduler: Literal["none", "dp_balanced"] = "none"
    """dp_balanced: with --packing, pack the samples of each step so that data-parallel ranks have equal work.
    --global_batch_size then counts samples, and the number of micro-batches varies."""
    streaming: bool = False
    """Read, tokenize and pack rows in file order during training; each data-parallel rank tokenizes a share of the
    rows. Requires --packing and --train_iters."""
    interleave_prob: list[float] = field(default_factory=list)
    """Share of rows from each --dataset, such as 0.7 0.3. Default: all rows of every --dataset. An epoch ends when the
    first file is exhausted; with --streaming each file restarts instead."""
    streaming_buffer_size: bounds.PositiveInt = 1000
    """Number of buffered samples that --streaming packs from."""
    sft_mock_dataset_config_json: dict[str, Any] | None = None
    """JSON: train on random tokens of given lengths instead of --dataset, for benchmarks; see docs/en/packing.md."""


@dataclass(frozen=True)
class DocumentArgs:
    """Documents"""

    append_eos: bool = True
    """Append the tokenizer's eos token to each document, so that the model learns where texts end."""
    truncation_strategy: TruncationStrategy = "split"
    """Treatment of documents longer than --max_length: split them into pieces, delete them, truncate left or right, or
    stop with an error."""
    packing: bool = True
    """Pack documents, and pieces of long ones, into rows of --packing_length tokens, without attention between them.
    Batch sizes then count rows."""


@dataclass(frozen=True)
class PreferenceArgs:
    """Preferences"""

    ref_model: str | None = None
    """Reference model, a Hugging Face model as for --model. Default: --model before the first step."""
    ref_tensor_model_parallel_size: bounds.PositiveInt | None = None
    """Tensor-parallel size of the reference model. Default: --tensor_model_parallel_size."""
    ref_pipeline_model_parallel_size: bounds.PositiveInt | None = None
    """Pipeline-parallel size of the reference model. Default: --pipeline_model_parallel_size."""
    loss_type: PreferenceLoss = "sigmoid"
    """Preference loss, by TRL's names. sigmoid: DPO. hinge, ipo, robust, apo_zero, apo_down: variants of DPO. simpo (as
    in TRL's CPO), orpo: without a reference model. kto: single answers labeled good or bad."""
    beta: bounds.PositiveFloat = 0.1
    """Weight of the distance from the reference model; with ipo, tau of the IPO paper; with orpo, lambda of the ORPO
    paper."""
    label_smoothing: Annotated[float, Interval(ge=0, lt=0.5)] = 0.0
    """With sigmoid, robust and simpo: assumed share of pairs with swapped labels, below 0.5."""
    simpo_gamma: bounds.NonNegativeFloat = 0.5
    """With simpo: target margin between beta times the log-probabilities per token of both answers."""
    cpo_alpha: bounds.NonNegativeFloat = 1.0
    """With simpo: weight of the next-token loss on chosen answers; the SimPO paper uses 0."""
    desirable_weight: bounds.NonNegativeFloat = 1.0
    """With kto: weight of the loss of good answers."""
    undesirable_weight: bounds.NonNegativeFloat = 1.0
    """With kto: weight of the loss of bad answers."""
    ref_logprobs_cache: str | None = None
    """Directory for the log-probabilities of the reference model, which later runs over the same pairs read. Default:
    OUTPUT_DIR/reference."""


@dataclass(frozen=True)
class RewardModelArgs:
    """Reward model"""

    center_rewards_coefficient: bounds.NonNegativeFloat | None = None
    """Weight of the squared sum of the rewards of both answers, such as 0.01, which keeps rewards near 0. Default: 0.
    """
    mtp_num_layers: bounds.MtpDepth | None = 0
    """A reward model has no MTP heads."""
    lora_modules_to_save: list[str] = field(default_factory=lambda: ["score"])
    """Modules of the trunk that are trained in full: score, which must be among them, embed_tokens, norm, ..."""


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel layout"""

    tensor_model_parallel_size: bounds.PositiveInt = 1
    """Number of ranks that each matrix is split over."""
    sequence_parallel: bool = False
    """Also split the activations between matrices over tensor-parallel ranks, by position in the row."""
    pipeline_model_parallel_size: bounds.PositiveInt = 1
    """Number of pipeline stages that the layers are split into."""
    num_virtual_stages_per_pipeline_rank: bounds.PositiveInt | None = None
    """Number of interleaved stages per pipeline rank, for a shorter pipeline bubble. Default: 1."""
    pipeline_model_parallel_layout: str | None = None
    """Content of each stage, separated by |: E embedding, t decoder layer, m MTP layer, L loss; *N repeats, as in
    'Et*3|t*4|t*3mL'. Default: layers are distributed evenly, with the MTP layers on the last stage."""
    decoder_first_pipeline_num_layers: bounds.PositiveInt | None = None
    """Number of decoder layers on the first stage. Default: an even share."""
    decoder_last_pipeline_num_layers: bounds.PositiveInt | None = None
    """Number of decoder layers on the last stage. Default: an even share."""
    context_parallel_size: bounds.PositiveInt = 1
    """Number of ranks that each row is split over by position, for long rows."""
    expert_model_parallel_size: bounds.PositiveInt = 1
    """Number of ranks that the experts of a layer are distributed over."""
    expert_tensor_parallel_size: bounds.PositiveInt = 1
    """Number of ranks that the matrices of each expert are split over."""


@dataclass(frozen=True)
class TimeoutArgs:
    """Distributed optimizer and communication"""

    distributed_timeout_minutes: bounds.PositiveInt = 10
    """Maximum time that a rank waits for another in a step, and before the first step for a sign of life of another, in
    minutes. Then the run ends with an error."""


@dataclass(frozen=True)
class DistributedArgs(TimeoutArgs):
    """Distributed optimizer and communication"""

    optimizer: OptimizerName = "adamw"
    """adamw: AdamW, whose two moments have 8 bytes per parameter. adamw_8bit: torchao's AdamW, whose moments are
    rounded to 8 bits and have 2 bytes per parameter; main weights stay float32. muon: Muon for matrices except
    embeddings and output layers, whose momentum has 4 bytes per parameter, and AdamW for all other parameters."""
    use_distributed_optimizer: bool | None = None
    """Shard the optimizer state over data-parallel ranks. Default, also for --overlap_grad_reduce and
    --overlap_param_gather: true on GPUs with several data-parallel ranks."""
    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bfloat16 instead of float32: half the memory and communication, larger
    rounding errors. Requires --torch_dtype bfloat16."""
    num_distributed_optimizer_instances: bounds.PositiveInt = 1
    """With --use_distributed_optimizer: number of groups of data-parallel ranks, each of which shards a whole optimizer
    state. More groups use more memory, and send less between machines."""
    optimizer_cpu_offload: bool = False
    """Keep moments of AdamW in the memory of the host, and update these parameters on the CPU: 8 bytes less per
    parameter on the GPU, 16 bytes on the host, and slower steps."""
    optimizer_offload_fraction: bounds.PositiveFraction = 1.0
    """With --optimizer_cpu_offload: share of the parameters whose moments are on the host."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over data-parallel ranks during the backward pass."""
    overlap_param_gather: bool | None = None
    """Gather updated parameters during the forward pass; requires --use_distributed_optimizer and
    --overlap_grad_reduce."""
    ddp_bucket_size: bounds.PositiveInt | None = None
    """With --overlap_grad_reduce: number of parameters of a bucket, whose gradients are reduced together. Default: 40
    million, or more for more than 40 data-parallel ranks, a million per rank."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    """With --use_distributed_optimizer: pad buckets to a multiple of 65,536 parameters, which NCCL sends faster between
    many ranks."""
    nccl_ub: bool = False
    """Allocate parameters and gradients in buffers that are registered with NCCL, which then uses fewer multiprocessors
    of the GPU. Requires GPUs."""


@dataclass(frozen=True)
class MegatronArgs:
    """Settings of megatron-core"""

    megatron_config: dict[str, Any] | None = None
    """JSON, or the path of a JSON file: settings of megatron-core without an option, by their names in its config
    classes, such as {"moe_z_loss_coeff": 0.001}; see docs/en/parallel.md."""


@dataclass(frozen=True)
class KernelArgs:
    """Kernels"""

    transformer_impl: TransformerImpl = "local"
    """Implementation of linear layers and norms: torch (local) or, on NVIDIA GPUs, Transformer Engine. Checkpoints are
    interchangeable."""
    fused_kernels: Literal["auto", "none"] = "auto"
    """auto: on GPUs, use fused kernels for norms and activations, and compute losses without storing all logits. none:
    round exactly where transformers does."""
    fp8_format: Literal["none", "e4m3", "hybrid"] = "none"
    """Use 8-bit matmuls in linear layers during training, on GPUs that support them. hybrid: gradients in e5m2,
    everything else in e4m3. With --transformer_impl transformer_engine also in experts and for the gradients of
    weights. Checkpoints and exports stay in --torch_dtype."""
    fp8_recipe: Literal["rowwise", "tensorwise", "blockwise", "mxfp8"] | None = None
    """Granularity of the scales: one per row or tensor (--transformer_impl local); one per tensor, per block of 128, or
    per block of 32 (Blackwell) with Transformer Engine. Default: rowwise, with Transformer Engine blockwise."""
    fp4_format: Literal["none", "e2m1"] = "none"
    """Like --fp8_format, with 4-bit matmuls (NVFP4, Blackwell). Requires --transformer_impl transformer_engine."""
    num_layers_at_start_in_bf16: bounds.NonNegativeInt = 1
    """With --fp8_format or --fp4_format: number of first decoder layers that stay in bfloat16."""
    num_layers_at_end_in_bf16: bounds.NonNegativeInt = 1
    """With --fp8_format or --fp4_format: number of last decoder layers that stay in bfloat16."""
    attention_backend: Literal["auto", "sdpa", "flash", "flash3", "flash4", "cudnn", "te"] = "auto"
    """sdpa: torch's attention, one call per sequence. flash: one call per packed row, of flash-attn if it is installed,
    else of torch. flash3, flash4: torch's attention with the kernels of flash-attn 3 (Hopper) or 4 (Hopper, Blackwell),
    which must be installed. cudnn: cuDNN's for long sequences, otherwise like flash. te: Transformer Engine's. auto:
    cudnn on Hopper GPUs, flash on others, in bfloat16 and if available; else sdpa."""
    deterministic_mode: bool = False
    """Use deterministic GPU kernels, which are slower: identical runs are bitwise identical. Operations without a
    deterministic kernel end the run. CPU runs are always deterministic."""


@dataclass(frozen=True)
class RecomputeArgs:
    """Activation recomputation"""

    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activations that are recomputed in the backward pass instead of stored: none, those of some modules of each layer
    (selective), or of whole layers, MTP layers included (full)."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """With full: uniform stores the input of every Nth layer, block recomputes only the first N layers of a stage."""
    recompute_num_layers: bounds.PositiveInt = 1
    """N of --recompute_method."""
    recompute_modules: list[str] = field(default_factory=lambda: ["core_attn"])
    """With selective: modules to recompute, of core_attn, mlp, moe, mla_up_proj."""
    distribute_saved_activations: bool = False
    """With full: shard the stored inputs over tensor-parallel ranks. Not supported with --sequence_parallel."""


@dataclass(frozen=True)
class MoeArgs:
    """Mixture of experts"""

    moe_aux_loss_coeff: bounds.NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of routers."""
    moe_router_bias_update_rate: bounds.NonNegativeFloat = 0.0
    """Amount by which a router's expert bias changes after each optimizer step, to balance the load; 0 keeps the
    bias."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    """How tokens reach the ranks of their experts. alltoall: each token is sent to the ranks of its experts. allgather:
    every rank receives all tokens. flex: like alltoall, with fused GPU kernels of --moe_flex_dispatcher_backend."""
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] = "deepep"
    """With --moe_token_dispatcher_type flex: the library with the kernels, which must be installed."""
    moe_shared_expert_overlap: bool = False
    """Compute shared experts while tokens are sent to other experts; requires --moe_token_dispatcher_type alltoall and
    experts that are distributed over ranks."""


@dataclass(frozen=True)
class IndexerArgs:
    """Sparse attention"""

    indexer_mode: IndexerMode = "frozen"
    """Training of the indexers of sparse attention (DSA), which select the tokens that each token sees. frozen: they
    are not trained. joint: they are trained with the model, by their own loss over the selected tokens. indexer_only:
    only indexers are trained, with attention to all tokens (dense warm-up)."""
    indexer_loss_coeff: bounds.PositiveFloat = 1.0
    """Weight of the loss of indexers, which is a mean over tokens and a sum over layers. It has no gradient with
    respect to the rest of the model."""


@dataclass(frozen=True)
class VisionArgs:
    """Vision tower"""

    freeze_vit: bool = True
    """Keep the vision tower unchanged, except for its aligner. Without images in the rows, the tower is not computed
    and never changes."""
    freeze_aligner: bool = True
    """Keep the aligner unchanged: the part of the vision tower that maps its features to embeddings of the language
    model."""
    freeze_llm: bool = False
    """Keep the trunk of the language model unchanged; train the vision tower, the aligner and the MTP heads."""
    vit_gradient_checkpointing: bool = True
    """Recompute the activations of a trained vision tower in the backward pass, instead of storing them."""
    vit_lr: bounds.PositiveFloat | None = None
    """Peak learning rate of the vision tower without its aligner. Default: --lr."""
    aligner_lr: bounds.PositiveFloat | None = None
    """Peak learning rate of the aligner. Default: --lr."""


@dataclass(frozen=True)
class OptimArgs:
    """Batches, optimizer and schedule"""

    micro_batch_size: bounds.PositiveInt = 1
    """Number of samples per forward pass on one rank."""
    global_batch_size: bounds.PositiveInt = 16
    """Number of samples per optimizer step over all ranks; gradients are accumulated as needed."""
    num_train_epochs: bounds.PositiveFloat = 1.0
    """Number of passes over the training rows; ignored if --train_iters is set."""
    train_iters: bounds.NonNegativeInt | None = None
    """Number of optimizer steps; overrides --num_train_epochs. With 0 nothing is trained: the run measures the heads as
    --mtp_init initialized them, and saves checkpoint-0."""
    lr: bounds.PositiveFloat | None = None
    """Peak learning rate. Default: 1e-5; 1e-6 in megatron dpo and grpo; 1e-4 with --tuner_type lora; with --mtp_mode
    heads_only 1e-3 for new heads, and 3e-4 for grafted ones and for those of a quantized model."""
    min_lr: bounds.NonNegativeFloat | None = None
    """Learning rate at the end of the decay. Default: a tenth of --lr."""
    lr_decay_style: LrDecayStyle = "cosine"
    """Shape of the learning-rate decay. inverse-square-root: falls with 1 / sqrt(step) after the warmup. WSD: constant,
    then the decay of --lr_wsd_decay_style over the last steps."""
    lr_wsd_decay_fraction: bounds.PositiveFraction = 0.2
    """With --lr_decay_style WSD: share of the steps with the decay."""
    lr_wsd_decay_style: WsdDecayStyle = "cosine"
    """With --lr_decay_style WSD: shape of the decay, by megatron-core's names. With x from 0 to 1, minus_sqrt is 1 -
    sqrt(x), and exponential 2 * 0.5^x - 1."""
    lr_warmup_fraction: bounds.Fraction = 0.05
    """Share of the steps with linear warmup from 0."""
    weight_decay: bounds.NonNegativeFloat = 0.1
    """AdamW weight decay; not applied to biases and norms."""
    adam_beta1: bounds.ProperFraction = 0.9
    """AdamW beta1."""
    adam_beta2: bounds.ProperFraction = 0.95
    """AdamW beta2."""
    adam_eps: bounds.PositiveFloat = 1e-8
    """AdamW epsilon."""
    clip_grad: bounds.NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 disables clipping. See also --mtp_clip_grad."""
    skip_bad_steps: bounds.NonNegativeFloat = 0.0
    """Do not apply a step whose loss or gradient norm is not finite, or is more than this number of standard deviations
    above the mean of the last 128 applied steps; at most 10 steps in a row. 0: a step that is not finite ends the run,
    and all other steps are applied."""
    seed: bounds.Seed = 42
    """Seed for data order, splits, random initialization and dropout."""


@dataclass(frozen=True)
class RunArgs:
    """Run: saving, evaluating, resuming"""

    output_dir: str = ""
    """Directory for checkpoints, metrics and reports."""
    resume: bool = False
    """Resume from the newest complete checkpoint in --output_dir; results are bitwise identical with the same layout.
    Without a checkpoint, start from the beginning."""
    save_steps: bounds.PositiveInt = 500
    """Number of steps between checkpoints; another one is written at the end."""
    ephemeral_save_steps: bounds.PositiveInt | None = None
    """Number of steps between additional checkpoints; each is deleted as soon as a newer checkpoint is complete.
    Default: none."""
    max_restarts: bounds.NonNegativeInt = 0
    """How often the run is restarted from its newest complete checkpoint after a process or a node has failed. 0: a
    failure ends the run. Errors that would repeat are not restarted, such as wrong options."""
    async_save: bool = False
    """Write checkpoints in a subprocess while training continues."""
    save_total_limit: bounds.PositiveInt | None = None
    """Number of newest checkpoints to keep, without that of --ephemeral_save_steps. The best one by
    --metric_for_best_model is kept too. Default: all."""
    metric_for_best_model: str | None = None
    """Metric of evaluations that determines the best checkpoint: loss, acceptance (mean over the heads), reward, or
    another name in metrics.jsonl; eval_ may be omitted. Default: none; with --load_best_model_at_end loss."""
    greater_is_better: bool | None = None
    """Whether a greater value of --metric_for_best_model is better. Default: true, unless the name ends with loss."""
    load_best_model_at_end: bool = False
    """Load the best checkpoint after the last step: acceptance.json describes it, and export converts it instead of the
    newest one. --save_steps must be a multiple of --eval_steps."""
    early_stopping_patience: bounds.PositiveInt | None = None
    """End training after this number of evaluations in a row that did not improve --metric_for_best_model. Default:
    never."""
    early_stopping_threshold: bounds.NonNegativeFloat = 0.0
    """With --early_stopping_patience: minimum change of the metric that counts as an improvement."""
    checkpoint_store: str | None = None
    """URL of an object store (s3://, gs://, az://) or another directory, to which checkpoints are copied while training
    continues; --resume also finds the newest checkpoint there. Requires the package obstore."""
    eval_steps: bounds.PositiveInt | None = None
    """Number of steps between evaluations on the held-out rows. Default: --save_steps."""
    eval_iters: bounds.PositiveInt | None = None
    """Number of global batches per evaluation. Default: all held-out rows."""
    logging_steps: bounds.PositiveInt = 1
    """Number of steps between entries in metrics.jsonl and in --report_to."""
    report_to: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Trackers for metrics in addition to metrics.jsonl: tensorboard (files in OUTPUT_DIR/tensorboard, if the package
    is installed), wandb, swanlab, mlflow, trackio; none disables them."""
    acceptance_samples: bounds.NonNegativeInt = 16
    """Number of held-out prompts that the model continues greedily, before and after training, to measure the
    acceptance of drafts for acceptance.json. 0 disables this."""
    acceptance_max_new_tokens: bounds.PositiveInt = 64
    """Number of tokens generated per prompt for --acceptance_samples."""
    dry_run: bool = False
    """Print the plan of the run and exit before any weight is read."""


@dataclass(frozen=True)
class ProfilingArgs:
    """Profiling"""

    profile_steps: list[int] = field(default_factory=list)
    """First and last step to profile, such as 10 12; the files are in OUTPUT_DIR/profile. Default: no profile."""
    profile_kind: ProfileKind = "torch"
    """torch: a trace of torch's profiler for Perfetto, and a table of the slowest operators. nsys: a range for Nsight
    Systems, which must start the command. memory: a snapshot of the memory of a GPU for pytorch.org/memory_viz."""
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks to profile."""


Speculative = Literal["none", "mtp", "mtp,ngram", "ngram"]
WITH_HEADS = ("mtp", "mtp,ngram")
"""Values of `Speculative` with which heads draft."""


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
    """Instead, read the draft counters of a running vLLM server at this address, such as http://127.0.0.1:8000, add
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


FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty")
"""Options of `SamplingArgs` that change the distribution of the next token."""


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
