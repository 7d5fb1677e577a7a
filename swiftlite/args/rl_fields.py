"""Define the options of reinforcement learning (`megatron grpo`)."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval

from swiftlite.args import bounds
from swiftlite.args.fields import LrDecayStyle
from swiftlite.args.serving_fields import SamplingArgs

PolicyLoss = Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo"]
ImportanceSamplingLevel = Literal["token", "sequence"]
MismatchMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
AdvantageEstimator = Literal["grpo", "rloo", "reinforce_plus_plus"]
RewardScale = Literal["group", "batch", "none"]


@dataclass(frozen=True)
class PolicyArgs:
    """Policy loss"""

    loss_type: PolicyLoss = "dapo"
    """How token losses are averaged, by TRL's names. dapo: over the tokens of the batch. grpo: over the tokens of each
    completion, then over completions. dr_grpo: over completions, divided by --max_completion_length. bnpo: over the
    tokens of each micro-batch, then over micro-batches. cispo: like dapo, with clipped importance weights instead of
    clipped losses. sapo: like grpo, with a smooth gate instead of clips."""
    importance_sampling_level: ImportanceSamplingLevel = "token"
    """token: a probability ratio for each token. sequence: one ratio for each completion (GSPO)."""
    epsilon: bounds.ProperFraction = 0.2
    """Ratios below 1 - EPSILON or above 1 + EPSILON are clipped."""
    epsilon_high: bounds.PositiveFloat | None = None
    """Upper clip range instead of --epsilon; with cispo, the upper bound of the ratio itself, such as 5. Default:
    --epsilon."""
    delta: bounds.PositiveFloat | None = None
    """Upper bound of ratios also where the advantage is negative (two-sided clipping); above 1 + --epsilon_high.
    Default: no bound."""
    sapo_temperature_pos: bounds.PositiveFloat = 1.0
    """With --loss_type sapo: steepness of the gate for tokens with positive advantages."""
    sapo_temperature_neg: bounds.PositiveFloat = 1.05
    """The same for other tokens."""
    overlong_filter: bool = False
    """Do not train on completions that reach --max_completion_length (TRL: mask_truncated_completions). Their rewards
    still count in the advantages of their group."""
    entropy_coef: bounds.NonNegativeFloat = 0.0
    """Weight of the mean entropy of the policy's distributions, which is increased (TRL)."""
    beta: bounds.NonNegativeFloat = 0.0
    """Weight of the KL divergence from --ref_model."""
    use_bias_correction_kl: bool = True
    """With --beta: multiply the estimate of the KL divergence by the probability ratio, so that its gradient is that of
    the reverse KL divergence. Default of TRL."""
    ref_model: str | None = None
    """With --beta: reference model, a Hugging Face model as for --model. Default: --model before the first step."""
    ref_tensor_model_parallel_size: bounds.PositiveInt | None = None
    """Tensor-parallel size of the reference model. Default: --tensor_model_parallel_size."""
    ref_pipeline_model_parallel_size: bounds.PositiveInt | None = None
    """Pipeline-parallel size of the reference model. Default: --pipeline_model_parallel_size."""
    sync_ref_model: bool = False
    """With --beta: move the reference model towards the model every --ref_model_sync_steps steps (TR-DPO, TRL)."""
    ref_model_mixup_alpha: bounds.Fraction = 0.6
    """With --sync_ref_model: share A of the model in the new weights, A * model + (1 - A) * reference. Default of
    TRL."""
    ref_model_sync_steps: bounds.PositiveInt = 512
    """With --sync_ref_model: number of steps after which the reference model is moved. Default of TRL."""
    teacher_model: str | None = None
    """Teacher, a Hugging Face model as for --model, with the same tokenizer: its probability of each sampled token is
    part of the advantage (on-policy distillation). --reward_funcs is then optional."""
    teacher_tensor_model_parallel_size: bounds.PositiveInt | None = None
    """Tensor-parallel size of the teacher. Default: --tensor_model_parallel_size."""
    teacher_pipeline_model_parallel_size: bounds.PositiveInt | None = None
    """Pipeline-parallel size of the teacher. Default: --pipeline_model_parallel_size."""
    teacher_kl_coef: bounds.PositiveFloat = 1.0
    """With --teacher_model: COEF * (log p_teacher - log p) is added to the advantage of each token. Default of
    ms-swift."""
    rollout_importance_sampling_mode: MismatchMode = "token_truncate"
    """Correction for the difference between the probabilities of engine and trainer. Weights above the threshold are
    truncated, or their tokens are masked; sequence: one weight for each completion."""
    rollout_importance_sampling_threshold: bounds.PositiveFloat = 2.0
    """Threshold of --rollout_importance_sampling_mode."""
    lr_decay_style: LrDecayStyle = "constant"
    """Shape of the learning-rate decay. inverse-square-root: falls with 1 / sqrt(step) after the warmup. WSD: constant,
    then the decay of --lr_wsd_decay_style over the last steps."""


@dataclass(frozen=True)
class RewardArgs:
    """Rewards and advantages"""

    reward_funcs: list[str] = field(default_factory=list)
    """Reward functions: names of the library (accuracy, format, length, json_schema, code) or of functions in
    --external_plugins. The rewards of a completion are added."""
    reward_weights: list[float] = field(default_factory=list)
    """Weight of each reward function, then of each reward model, then of each reward server. Default: 1."""
    reward_model: list[str] = field(default_factory=list)
    """Directories of reward models, from megatron rm or other classifiers with one label in transformers' format: their
    scores are added to the rewards. Each has its own tokenizer and chat template."""
    reward_tensor_model_parallel_size: bounds.PositiveInt | None = None
    """Tensor-parallel size of the reward models. With this option or the next one, they are on the ranks of the run
    instead of one process, and must be of families that megatron rm trains. Default:
    --tensor_model_parallel_size."""
    reward_pipeline_model_parallel_size: bounds.PositiveInt | None = None
    """Pipeline-parallel size of the reward models. Default: --pipeline_model_parallel_size."""
    reward_server: list[str] = field(default_factory=list)
    """Addresses of servers with a reward model, such as http://a:8001 of vllm serve REWARD_MODEL: their scores are
    added to the rewards. The API key is read from VLLM_API_KEY."""
    external_plugins: list[str] = field(default_factory=list)
    """Python files with reward functions, which run in a child process."""
    reward_timeout: bounds.PositiveFloat = 60.0
    """Maximum time of a call of a reward function in seconds; completions are then not scored by this function.
    accuracy and code limit each completion instead."""
    allow_code_rewards: bool = False
    """Allow --reward_funcs code to run programs that the model wrote. They run in a subprocess with limits, which is
    not a sandbox."""
    soft_cache_length: bounds.PositiveInt | None = None
    """With the reward length: number of tokens before --max_completion_length over which the reward falls from 0 to -1.
    Default: a fifth of --max_completion_length."""
    num_generations: bounds.PositiveInt = 8
    """Number of completions per prompt, whose rewards are compared; 1 is possible without rewards."""
    advantage_estimator: AdvantageEstimator = "grpo"
    """grpo: reward minus the mean of the group. rloo: reward minus the mean of the other completions of the group.
    reinforce_plus_plus: as grpo, but --scale_rewards batch is the standard deviation of advantages instead of rewards
    (REINFORCE++ baseline)."""
    scale_rewards: RewardScale | None = None
    """Divide advantages by the standard deviation of the group, of the batch, or not at all. Default: group; with rloo
    none, with reinforce_plus_plus batch."""


@dataclass(frozen=True)
class CompletionArgs(SamplingArgs):
    """Rollouts"""

    infer_backend: str = "transformers"
    """Engine that generates completions: transformers, vllm or sglang."""
    rollout_server: list[str] = field(default_factory=list)
    """Addresses of vLLM servers that generate completions instead of --infer_backend, such as http://a:8000
    http://b:8000. They are started by swiftlite deploy --live_weights; their api_key is read from VLLM_API_KEY."""
    max_completion_length: bounds.PositiveInt = 256
    """Maximum length of a completion in tokens."""
    temperature: bounds.PositiveFloat = 1.0
    """Sampling temperature; losses use the same temperature."""
    speculative: Literal["none", "mtp"] = "mtp"
    """mtp: the heads draft tokens in rollouts, if the model has heads; the distribution of completions is the same."""
    num_speculative_tokens: bounds.PositiveInt | None = None
    """Number of draft tokens per step. Default: the number that the heads were trained for."""
    draft_schedule: str | None = None
    """With vllm: a bench.json of `swiftlite bench`: adapt the number of draft tokens to the number of completions in
    progress, which decreases within a generation."""
    mtp_lr: bounds.PositiveFloat | None = None
    """Peak learning rate of the heads. Default: --lr."""
    max_batch_size: bounds.PositiveInt = 64
    """Maximum number of completions that the engine, or each --rollout_server, generates at once."""
    weight_transport: Literal["file", "ipc"] | None = None
    """With --infer_backend vllm: transport of new weights. file: the temporary directory; ipc: within the GPU of the
    first rank. Default: ipc if vllm has only this GPU, otherwise file."""
    vllm_engine_kwargs: dict[str, Any] | None = None
    """JSON: keyword arguments of vLLM's engine, which override swiftlite's; null removes one. Default on GPUs:
    {"gpu_memory_utilization": 0.3}, the share of the memory of TRL, and {"enable_sleep_mode": true}, with which vLLM
    frees this memory while the trainer trains, except with --async_rollouts."""
    sglang_engine_kwargs: dict[str, Any] | None = None
    """JSON: options of SGLang's engine, with underscores in their names, which override swiftlite's; null removes
    one. Default on GPUs: {"mem_fraction_static": 0.3}."""
    rollouts_from: str | None = None
    """Directory with stored rollouts of another run (its OUTPUT_DIR/rollouts), which are trained on without an engine
    and without rewards."""
    rollouts_total_limit: bounds.PositiveInt | None = None
    """Number of newest generations to keep in OUTPUT_DIR/rollouts, besides those that --resume needs. Default: all."""


@dataclass(frozen=True)
class RolloutArgs(CompletionArgs):
    """Rollouts"""

    steps_per_generation: bounds.PositiveInt = 1
    """Number of optimizer steps on the completions of one generation, each with --global_batch_size completions."""
    num_iterations: bounds.PositiveInt = 1
    """Number of passes over the completions of a generation."""
    async_rollouts: Annotated[int, Interval(ge=0, le=1)] = 0
    """1: generate the next completions while training on the current ones, with weights that are one generation old;
    the importance weights correct for this. 0: generate with the current weights, and wait."""
    log_completions: bool = False
    """Send the completions of each generation as a table to wandb, swanlab and trackio (--report_to): prompt,
    completion, scores of the reward functions and advantage. SwanLab requires pyecharts."""
    dynamic_sample: bool = False
    """Replace the completions of a prompt whose rewards do not differ by those of a further prompt (DAPO)."""
    max_resample_times: bounds.PositiveInt = 3
    """With --dynamic_sample: maximum number of rounds in which completions are replaced."""
    tools: str | None = None
    """Python file with tools: functions with type hints and docstrings in Google's format. The model can call them in
    completions, which then have several answers, with the results of the calls between them."""
    rollout_func: str | None = None
    """Function of --external_plugins that conducts the conversation of a completion: async def NAME(messages,
    generate)."""
    max_turns: bounds.PositiveInt = 8
    """With --tools or --rollout_func: maximum number of answers of a completion. All answers and messages together have
    at most --max_completion_length tokens."""
    tool_timeout: bounds.PositiveFloat = 30.0
    """Maximum time of a call of a tool in seconds; with --rollout_func, of the function between two answers."""


@dataclass(frozen=True)
class DistillationArgs(CompletionArgs):
    """Distillation"""

    teacher_model: str | None = None
    """Teacher, a Hugging Face model as for --model, with the same tokenizer."""
    teacher_tensor_model_parallel_size: bounds.PositiveInt | None = None
    """Tensor-parallel size of the teacher. Default: --tensor_model_parallel_size."""
    teacher_pipeline_model_parallel_size: bounds.PositiveInt | None = None
    """Pipeline-parallel size of the teacher. Default: --pipeline_model_parallel_size."""
    lmbda: bounds.Fraction = 0.5
    """Probability that a step trains on completions of the model itself; the other steps train on the answers of the
    rows. Default of TRL and ms-swift."""
    beta: bounds.Fraction = 0.5
    """Weight of the teacher in the mixture of the generalized Jensen-Shannon divergence. 0: KL(teacher || model). 1:
    KL(model || teacher)."""
    loss_temperature: bounds.PositiveFloat = 1.0
    """Temperature of both distributions in the loss. TRL's GKDTrainer uses 1, ms-swift uses --temperature."""
    temperature: bounds.PositiveFloat = 0.9
    """Sampling temperature of completions."""
    max_completion_length: bounds.PositiveInt = 128
    """Maximum length of a completion in tokens; TRL's max_new_tokens."""
    loss_scale: Literal["default", "last_round", "all"] = "last_round"
    """Trained tokens of rows: assistant turns after the last user turn (last_round), every assistant turn (default), or
    all tokens. Completions are trained whole."""
    rollouts_from: str | None = None
    """Directory with stored rollouts of another run (its OUTPUT_DIR/rollouts), which are trained on without an
    engine."""
