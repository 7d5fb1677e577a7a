"""Find all families, by the `model_type` of Hugging Face: those that the modules of `models/` define."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from swiftlite.base.errors import UserError
from swiftlite.base.heads import kind_of
from swiftlite.bridge.hf_config import has_tensors
from swiftlite.data.image_sizes import ImageSizes
from swiftlite.families import dense, models
from swiftlite.families.architecture import Architecture
from swiftlite.families.dense import refuse
from swiftlite.families.drafters import is_published
from swiftlite.families.family import Family, HfConfig
from swiftlite.families.rank import Rank
from swiftlite.families.reward_model import is_reward_model
from swiftlite.families.values import rope_problems, value_problems
from swiftlite.families.vision import channels_of


def _all_families() -> dict[str, Family]:
    """Return every `Family` in the modules of `models/`, by its name."""
    found: dict[str, Family] = {}
    for module in iter_modules(models.__path__, f"{models.__name__}."):
        content = vars(import_module(module.name)).values()
        for family in content:
            # Modules also contain the families that they import.
            if isinstance(family, Family) and found.setdefault(family.name, family) is not family:
                raise ValueError(f"{module.name}: another module of models/ defines the family {family.name!r}")
    return dict(sorted(found.items()))


FAMILIES = _all_families()


def get(hf_config: HfConfig, hf_dir: str | Path | None = None) -> Family:
    """Return the family of a config.json, after checking that its settings are supported.

    Args:
        hf_dir: directory of the config, named in errors. Of a family whose files have different names of tensors, the
            result has those of the directory.

    Raises:
        UserError: the model_type is unknown, or a setting that changes the computation is not supported.
    """
    family = find(hf_config)
    if family is None:
        where = Path(hf_dir or ".") / "config.json"
        if is_published(hf_config):
            raise UserError(
                f"{where}: {hf_config['model_type']} is a drafter, not a model",
                "give its trunk with --model; to train the drafter, add --mtp_graft_from with its directory",
            )
        raise UserError(
            f"{where}: model_type {hf_config.get('model_type')!r} is not supported",
            f"supported: {', '.join(FAMILIES)}; docs/en/add-a-family.md shows how to add one",
        )
    try:
        refuse(hf_config, value_problems(hf_config, family.numbers_by_layer))
        family.check(hf_config)
        refuse(hf_config, _rope_problems(family, hf_config))
        if why := family.drafter(hf_config).why_not(family, hf_config):
            refuse(hf_config, [f"the model cannot have the drafter {kind_of(hf_config)!r}: {why}"])
    except UserError as error:
        if hf_dir is None:
            raise
        raise UserError(f"{Path(hf_dir)}/{error.problem}", error.hint) from None  # the message starts with config.json
    if family.renamed is not None and hf_dir is not None and has_tensors(Path(hf_dir), dense.IN_WRAPPER):
        return family.renamed
    return family


def _rope_problems(family: Family, hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) for every rotary setting with which no frequencies can be computed."""
    problems: dict[str, None] = {}
    for settings in family.outside(hf_config).ropes or (hf_config,):
        # As in transformers, rope_scaling has precedence.
        key = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
        problems |= dict.fromkeys(f"{key}: {problem}" for problem in rope_problems(settings.get(key) or {}))
    return list(problems)


def architecture_of(hf_config: HfConfig) -> Architecture:
    """Return the architecture of a config.json that the family has not checked; for estimates only.

    Raises:
        UserError: the model_type is unknown, or a size is missing.
    """
    family = find(hf_config)
    if family is None:
        problem = f"model_type {hf_config.get('model_type')!r}: its memory is unknown"
        raise UserError(problem, f"known: {', '.join(FAMILIES)}")
    architecture = _countable(family, hf_config)
    if architecture is None:
        problem = f"config.json (model_type {family.name!r}) lacks a size, so its memory is unknown"
        raise UserError(problem, "copy it from the model's source again")
    return with_drafter_sizes(architecture, family, hf_config)


def with_drafter_sizes(architecture: Architecture, family: Family, hf_config: HfConfig) -> Architecture:
    """Return the architecture with the sizes of the drafter that config.json declares."""
    sizes = family.drafter(hf_config).sizes
    if sizes is None:
        return architecture
    return replace(architecture, drafter=partial(sizes, family, hf_config))


def known_architecture(hf_config: HfConfig) -> Architecture | None:
    """Return the architecture of a config.json for rules; None if it is incomplete.

    The architecture is incomplete if config.json is missing, has an unknown model_type or does not contain a size, or
    declares a drafter that the model cannot have. One rule or the family reports this problem, and all other rules
    ignore it.
    """
    family = find(hf_config)
    if family is None or value_problems(hf_config, family.numbers_by_layer):
        return None
    architecture = _countable(family, hf_config)
    if architecture is None or family.drafter(hf_config).why_not(family, hf_config):
        return None
    return architecture


def _countable(family: Family, hf_config: HfConfig) -> Architecture | None:
    """Return the architecture; None if config.json does not contain a size that the memory estimate requires."""
    try:
        architecture = family.architecture(hf_config)
        architecture.outside.local_vocab(Rank())
        for layer in architecture.layers[:1]:
            architecture.mtp_block.parameters(Rank())
            layer.parameters(Rank())
        for part in architecture.sublayers:
            part.parameters(Rank())
            part.activation_bytes(Rank())
    except (KeyError, IndexError, TypeError, ZeroDivisionError):  # a size or a layer is missing, or not a number
        return None
    return architecture


def impossible_values(hf_config: HfConfig) -> list[str]:
    """Return a problem (one line) for every invalid value in the config.json of a known family."""
    family = find(hf_config)
    if family is None:
        return []
    return value_problems(hf_config, family.numbers_by_layer)


def find(hf_config: HfConfig) -> Family | None:
    """Return the family of a config.json that was not checked; None if it is unknown."""
    family = FAMILIES.get(str(hf_config.get("model_type")))
    if family is not None and is_reward_model(hf_config):
        return family.as_reward_model()
    return family


_SIZES_OF_IMAGES = ("patch_size", "temporal_patch_size", "spatial_merge_size")


def image_sizes(hf_config: HfConfig) -> ImageSizes | None:
    """Return the sizes of a model's image inputs; None for models without images, or whose config.json lacks a size.

    All families with a vision tower divide images, and count positions, in the same way (`data/image_inputs.py`).
    """
    family = find(hf_config)
    vision, image_token_id = hf_config.get("vision_config"), hf_config.get("image_token_id")
    if family is None or family.vision is None or not isinstance(vision, dict) or image_token_id is None:
        return None
    if any(key not in vision for key in _SIZES_OF_IMAGES):
        return None
    return ImageSizes(
        patch_size=vision["patch_size"],
        temporal_patch_size=vision["temporal_patch_size"],
        merge_size=vision["spatial_merge_size"],
        channels=channels_of(vision),
        image_token_id=image_token_id,
        vision_start_id=hf_config.get("vision_start_token_id"),
        vision_end_id=hf_config.get("vision_end_token_id"),
        video_token_id=hf_config.get("video_token_id"),
    )
