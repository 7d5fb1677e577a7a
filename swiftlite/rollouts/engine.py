"""Start the engine that generates completions during training, or connect to servers, and send weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from swiftlite.args.rl_fields import CompletionArgs
from swiftlite.base.log import logger
from swiftlite.data.dataset import Data
from swiftlite.data.image_inputs import images_of
from swiftlite.data.template import ChatTemplate, stop_token_ids
from swiftlite.engines.draft_schedule import read_schedule
from swiftlite.engines.engine import Engine, EngineConfig, RestingEngine, Sampling, filters_of, start_engine
from swiftlite.engines.index import ENGINES
from swiftlite.engines.stop_strings import stop_strings
from swiftlite.rollouts.servers import Requirements, RolloutServers, check_responding
from swiftlite.rollouts.stored import on_first_rank, raise_if
from swiftlite.train.live_weights import LiveWeights
from swiftlite.train.phases import Run
from swiftlite.train.stopping import EarlyStop, Stopped

MEMORY_SHARE = 0.3
"""Share of the GPU's memory for an engine that shares it with the trainer. Engines would otherwise require that nearly
the whole memory is free."""


def start_rollout_engine(run: Run, args: CompletionArgs) -> Engine:
    """Start the engine of a run, or connect to the servers of --rollout_server.

    Raises:
        UserError: the engine cannot be started, or a server cannot be used.
    """
    if args.rollout_server:
        requirements = Requirements(
            run.hf_model, run.args.max_length, drafts(run, args), num_speculative_tokens=args.num_speculative_tokens
        )
        # The other ranks wait while a request to a server is repeated, or another server takes its place.
        timeout = 60 * run.args.distributed_timeout_minutes / 2
        return RolloutServers(args.rollout_server, requirements, args.max_batch_size, timeout)
    num_drafts = 0
    if drafts(run, args):
        num_drafts = args.num_speculative_tokens or run.plan.heads.drafts
    schedule = None
    if num_drafts and args.draft_schedule:
        schedule = read_schedule(Path(args.draft_schedule), args.infer_backend)
        num_drafts = schedule.largest
        if num_drafts == 0:
            logger.info("--draft_schedule %s: drafts are disabled, because they were slower", args.draft_schedule)
            schedule = None
    config = EngineConfig(
        run.hf_model,
        torch_dtype=run.args.torch_dtype,
        trust_remote_code=run.args.trust_remote_code,
        num_speculative_tokens=num_drafts,
        max_model_len=run.args.max_length,
        max_batch_size=args.max_batch_size,
        max_images=most_images(run.data),
        draws_drafts=True,
        draft_schedule=schedule,
        engine_kwargs=engine_kwargs(args, run.mesh.device.is_cuda),
    )
    # An engine that draws ahead works while the trainer does, so it cannot sleep.
    if run.mesh.device.is_cuda and ENGINES[args.infer_backend].shares_gpu(args.vllm_engine_kwargs):
        config = replace(config, sleeps=not vars(args).get("async_rollouts"), weight_transport="ipc")
    if args.weight_transport:
        config = replace(config, weight_transport=args.weight_transport)
    engine = start_engine(args.infer_backend, config)
    rest(engine)
    return engine


def rest(engine: Engine) -> None:
    """Let an engine free its memory while the trainer trains, if it shares the trainer's GPU."""
    if isinstance(engine, RestingEngine):
        engine.rest()


def most_images(data: Data) -> int:
    """Return the largest number of images of a prompt, also of held-out ones."""
    if not data.has_images:
        return 0
    return max(len(images_of(prompt)) for prompt in (*data.train, *data.val))


def engine_kwargs(args: CompletionArgs, is_cuda: bool) -> dict[str, Any]:
    """Return the keyword arguments of the engine: those of the user, and a share of the GPU's memory."""
    info = ENGINES[args.infer_backend]
    kwargs = {}
    if is_cuda and info.memory_option:
        kwargs[info.memory_option] = MEMORY_SHARE
    return kwargs | (vars(args).get(info.kwargs_option) or {})


def check_servers(args: CompletionArgs) -> None:
    """Check that a server of --rollout_server responds, before data and model are read. Collective.

    Raises:
        UserError: no server responds.
    """
    if args.rollout_server and not args.rollouts_from:
        on_first_rank(lambda: check_responding(args.rollout_server))


def drafts(run: Run, args: CompletionArgs) -> bool:
    """Return whether the heads of the run draft its completions."""
    return args.speculative == "mtp" and bool(run.plan.heads.layers)


def send_weights(weights: LiveWeights, engine: Engine | None, stop: EarlyStop, *, draft: bool) -> None:
    """Send the weights of a run to the engine of the first rank. Collective.

    Args:
        engine: the engine; None on other ranks.
        draft: whether to send the heads as well.

    Raises:
        UserError: the engine fails; raised on every rank.
        Stopped: the run received a signal, which also ended the processes of the engine; raised on every rank.
    """
    receiver: Any = engine
    # The first rank must not leave this collective with an error of its own while the others wait in it.
    failure = None
    try:
        weights.send(receiver, draft=draft)
    except Exception as error:  # of the engine, on the first rank
        failure = Stopped() if stop.received else error  # Ctrl-C also ends the processes of an engine
    on_first_rank(lambda: raise_if(failure))


def sampling_of(run: Run, args: CompletionArgs) -> Sampling:
    """Return how completions are sampled."""
    return Sampling(
        args.max_completion_length,
        temperature=args.temperature,
        seed=run.args.seed,
        stop_token_ids=stop_token_ids(ChatTemplate(run.tokenizer), run.hf_model.directory),
        log_p=True,
        stop_strings=stop_strings(args.stop_strings, run.tokenizer),
        **filters_of(args),
    )
