"""Resolve the name of a model to an `HfModel`, once per command.

Rules read config.json before weights are downloaded (`plan/facts.py`).
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swiftlite.args.commands import RmArgs, SftArgs
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP, OWN_CONFIG_KEY, OWN_GENERATION_KEY, Heads, kind_of
from swiftlite.base.json_file import read_json
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.hf_config import HEADS_FILE, read_config
from swiftlite.families.drafters import DrafterOptions, is_published, with_drafter
from swiftlite.families.family import Family
from swiftlite.families.index import get
from swiftlite.families.reward_model import as_reward_model
from swiftlite.families.serving import stock
from swiftlite.families.tower import Tower
from swiftlite.hub.model import description_of, local_model
from swiftlite.hub.name import models_in


@dataclass(frozen=True)
class HfModel:
    """The description of a Hugging Face model, without its tensors.

    Attributes:
        name: the name that the user gave: a directory, a name on the hub or a GGUF file.
        directory: directory with config.json, safetensors and tokenizer.
        config: content of config.json.
    """

    name: str
    directory: Path
    config: dict[str, Any]
    family: Family

    @property
    def heads(self) -> Heads:
        """The MTP heads that config.json declares."""
        return Heads.from_config(self.config)

    @property
    def is_tied(self) -> bool:
        """Whether the output layer shares the embedding."""
        return self.family.outside(self.config).is_tied

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a sequence in training and in swiftlite's own decoding."""
        positions = self.config["max_position_embeddings"]
        if self.heads.unroll > 1:  # whose later steps do not select tokens
            positions = min(positions, self.family.architecture(self.config).index_topk or positions)
        return positions

    @property
    def quantization(self) -> Quantization | None:
        """The quantization that config.json declares."""
        return Quantization.of(self.config)

    @property
    def is_quantized(self) -> bool:
        """Whether config.json declares a quantization."""
        return self.quantization is not None

    @property
    def identity(self) -> str:
        """Identifier of the model that is equal on all machines: the commit, or the digest of a GGUF file; empty for a
        directory.
        """
        if self.directory == Path(self.name):
            return ""
        return self.directory.name

    @property
    def tower(self) -> Tower | None:
        """The tower that a run of the model computes; None without one."""
        return self.family.tower(self.config)

    @property
    def computes_images(self) -> bool:
        """Whether the family is that of a run whose rows have images."""
        return self.family.vision is not None and self.family.tower is self.family.vision

    def with_images(self) -> "HfModel":
        """Return the model for a run whose rows have images, see `Family.with_images`."""
        return replace(self, family=self.family.with_images(self.config))


def resolve(name: str | Path) -> HfModel:
    """Download a model if necessary, read its config.json and find its family.

    Args:
        name: a directory, or a name that `local_model` resolves.

    Raises:
        UserError: the model is not available, has no config.json, or is not supported.
    """
    directory = local_model(str(name))
    is_of_run = any((place / "args.json").is_file() for place in (directory, directory.parent))
    if is_of_run and not (directory / "config.json").is_file():
        raise UserError(
            f"{directory} is a training run, not a Hugging Face model",
            f"convert it first: swiftlite export --to_hf --model {directory} --output_dir DIR",
        )
    config = read_config(directory)
    family = get(config, directory)
    is_of_head = kind_of(config) == MTP and (directory / HEADS_FILE).is_file()
    if is_of_head and not stock.why_not(family, config):
        family = stock.with_draft(family, config)
    return HfModel(str(name), directory, config, family)


def resolve_options(args: Any) -> dict[str, HfModel]:
    """Resolve every model that a command's options name; return the models by option name. That of --model declares
    the drafter of --drafter or --mtp_features, or one that --mtp_graft_from names; of `megatron rm`, it is a reward
    model."""
    names = models_in(args)
    own = own_settings_of(description_of(names["mtp_graft_from"])) if "mtp_graft_from" in names else None
    grafted = names.pop("mtp_graft_from") if own else ""
    models = {option: resolve(name) for option, name in names.items()}
    if isinstance(args, RmArgs):
        model = models["model"]
        config = as_reward_model(model.config)
        models["model"] = replace(model, config=config, family=get(config, model.directory))
    model = models.get("model")
    if model is not None and isinstance(args, SftArgs):
        models["model"] = replace(model, config=with_drafter(model.config, DrafterOptions.of(args, own)))
    if own:
        models["mtp_graft_from"] = replace(models["model"], name=grafted, directory=local_model(grafted))
    return models


def own_settings_of(directory: Path) -> dict[str, Any] | None:
    """Return the content of the JSON files of a drafter that is published in a directory of its own, by their keys in
    the declaration (OWN_CONFIG_KEY, OWN_GENERATION_KEY); None for another model.
    """
    found = {}
    for key in (OWN_CONFIG_KEY, OWN_GENERATION_KEY):
        try:
            found[key] = read_json(directory / f"{key}.json")
        except (OSError, ValueError):
            continue
    config = found.get(OWN_CONFIG_KEY)
    return found if isinstance(config, dict) and is_published(config) else None
