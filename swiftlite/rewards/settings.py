"""Define the settings of reward functions and reward models."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftlite.args.commands import GrpoArgs  # whose import takes half of the start of the child process


@dataclass(frozen=True)
class RewardSettings:
    """Settings of the functions in `rewards/index.py`, and the time limit of all functions.

    Attributes:
        timeout: seconds after which a call of a function is stopped.
        max_completion_length: tokens of the longest completion, for `length`; None if `length` is not used.
        soft_cache_length: number of tokens before `max_completion_length` over which `length` decreases from 0 to -1;
            a fifth of `max_completion_length` if None, as in DAPO.
        allow_code: whether `code` may run Python that the model wrote.
        code_timeout: seconds that the tests of one completion may take, for `code`.
        answer_timeout: seconds that the comparison of one answer may take, for `accuracy` and `json_schema`.
        reward_models: directories of reward models, which follow the functions.
        reward_servers: addresses of servers with a reward model, which follow the reward models.
        trust_remote_code: whether Python files in these directories may be executed.
    """

    timeout: float = 60.0
    max_completion_length: int | None = None
    soft_cache_length: int | None = None
    allow_code: bool = False
    code_timeout: float = 5.0
    answer_timeout: float = 5.0
    reward_models: Sequence[str] = ()
    reward_servers: Sequence[str] = ()
    trust_remote_code: bool = False


def reward_settings_of(args: "GrpoArgs") -> RewardSettings:
    """Return the settings that the options of `megatron grpo` select."""
    return RewardSettings(
        timeout=args.reward_timeout,
        max_completion_length=args.max_completion_length,
        soft_cache_length=args.soft_cache_length,
        allow_code=args.allow_code_rewards,
        reward_models=tuple(args.reward_model),
        reward_servers=tuple(args.reward_server),
        trust_remote_code=args.trust_remote_code,
    )
