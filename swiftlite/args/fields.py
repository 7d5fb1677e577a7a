"""Groups of related options. The string under a field is its help text in `--help` and in docs/options.

`data_fields.py`, `serving_fields.py` and `rl_fields.py` have further groups. The options class of a command (see
`commands.py`) combines groups. The classes are frozen, so that options never change after parsing. Values that are
derived from options are in the `Plan`.
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
    which must be installed. cudnn: cuDNN's for long sequences and, if nvidia-cudnn-frontend is installed, for packed
    rows, one call per row; otherwise like flash. te: Transformer Engine's. auto: cuDNN's for long sequences on Hopper
    GPUs, otherwise flash, in bfloat16 and if available; else sdpa."""
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
