"""Rules of `infer`."""

from collections.abc import Iterator

from swiftlite.args.command_line import shell_line
from swiftlite.args.commands import GenerationCommand, InferArgs
from swiftlite.args.config import Problem
from swiftlite.args.serving_fields import WITH_HEADS
from swiftlite.engines.index import ENGINES
from swiftlite.plan.facts import Facts
from swiftlite.rules import common, engine_options


def speculation_has_heads(args: GenerationCommand, facts: Facts) -> Iterator[Problem]:
    if isinstance(args, InferArgs) and args.adapters:
        return  # adapters may include heads
    config = facts.directory / "config.json"
    if args.speculative in WITH_HEADS and config.is_file() and facts.hf_config and not facts.heads.layers:
        problem = f"--speculative {args.speculative} requires MTP heads; {common.no_heads(facts)}"
        yield problem, f"remove it, or {common.TRAIN_HEADS}"


def speculative_options_have_speculation(args: GenerationCommand, facts: Facts) -> Iterator[Problem]:
    if args.speculative != "none":
        return
    for name, value in engine_options.given_of_speculation(args).items():
        yield f"--{name} {shell_line(value)} requires --speculative mtp", "add --speculative mtp"


def what_is_measured_has_speculation(args: InferArgs, facts: Facts) -> Iterator[Problem]:
    if args.compare and args.speculative == "none":
        yield "--compare requires drafts", "add --speculative mtp, or ngram for a model without heads"
    # acceptance.json has the acceptance of the heads alone.
    if args.acceptance_json is not None and args.speculative != "mtp":
        yield "--acceptance_json requires --speculative mtp", "use --speculative mtp"


def acceptance_json_fits(args: InferArgs, facts: Facts) -> Iterator[Problem]:
    if args.acceptance_json is None:
        return
    yield from common.acceptance_json_exists(args, facts)
    if not args.val_dataset:
        yield "--acceptance_json requires --val_dataset", "add --val_dataset FILE"


def comparison_has_prompts(args: InferArgs, facts: Facts) -> Iterator[Problem]:
    if args.compare and not args.val_dataset:
        yield "--compare requires --val_dataset", "add --val_dataset FILE"


def settings_without_effect(args: GenerationCommand, facts: Facts) -> Iterator[str]:
    info = ENGINES[args.infer_backend]
    idle = {
        "max_batch_size": (not info.is_batched, f"{info.label} generates for one prompt at a time"),
        **dict.fromkeys(("top_p", "top_k", "min_p"), (args.temperature == 0, "--temperature 0 decodes greedily")),
    }
    yield from common.without_effect(args, idle)


def chat_has_no_images(args: InferArgs, facts: Facts) -> Iterator[str]:
    is_chat = (not args.val_dataset, "a chat has no images")
    yield from common.without_effect(args, dict.fromkeys(("media_root", "max_pixels", "min_pixels"), is_chat))


def length_is_the_models(args: GenerationCommand, facts: Facts) -> Iterator[str]:
    longest = facts.hf_config.get("max_position_embeddings")
    if longest and args.max_model_len and args.max_model_len > longest:
        yield (
            f"--max_model_len {args.max_model_len} exceeds max_position_embeddings {longest} in "
            f"{facts.directory / 'config.json'}"
        )


RULES = (
    common.hf_model_is_a_directory,
    common.val_dataset_files_exist,
    common.numbers_are_in_range,
    speculation_has_heads,
    speculative_options_have_speculation,
    what_is_measured_has_speculation,
    engine_options.options_of_engines_agree,
    engine_options.engine_is_installed,
    engine_options.engine_runs_the_family,
    engine_options.draft_confidence_has_its_engine,
    engine_options.sampling_options_have_their_engine,
    engine_options.ngrams_have_their_engine,
    engine_options.drafter_has_its_engine,
    engine_options.options_have_their_engine,
    engine_options.engine_kwargs_leave_what_has_an_option,
    acceptance_json_fits,
    engine_options.adapters_are_a_directory,
    comparison_has_prompts,
    common.images_have_a_place_and_a_size,
)
NOTES = (engine_options.float32_can_be_faster, settings_without_effect, chat_has_no_images, length_is_the_models)
