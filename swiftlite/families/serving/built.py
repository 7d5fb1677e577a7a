"""Determine which modules of MTP heads an engine builds quantized, and compare them with the files.

The functions follow the rules with which vLLM 0.32 and SGLang 0.5.23 compare the names of their modules with the lists
of quantization_config, so that a checkpoint can be checked without the engine. Tests compare the results with the
modules that vLLM builds, with those that SGLang builds for FP8 blocks, and for other methods with SGLang's own
comparison of names.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.rows import HfConfig, renamed
from swiftlite.families import Family
from swiftlite.families.serving.convention import Convention, Matching
from swiftlite.families.serving.index import CONVENTIONS, MATCHINGS
from swiftlite.families.serving.quantized import METHODS, HeadModules, engine_name, head_modules

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Modules of engines that compute several projections of the files at once."""
_FUSED_IN_TRUNK = {"in_proj_qkvz": ("in_proj_qkv", "in_proj_z"), "in_proj_ba": ("in_proj_b", "in_proj_a")}
"""The same for linear attention, which heads do not have."""


@dataclass(frozen=True)
class Module:
    """A module that an engine builds as a whole, quantized or plain.

    Attributes:
        name: the engine's name.
        shards: the engine's names of the modules in files that it consists of; for experts, those of the first expert.
        files: names in files of all modules that it consists of.
        is_plain: whether the engine never quantizes it.
    """

    name: str
    shards: tuple[str, ...]
    files: tuple[str, ...]
    is_plain: bool = False


def head_problems(
    quantization: Quantization,
    family: Family,
    hf_config: HfConfig,
    is_quantized: Mapping[str, bool],
    engines: Iterable[str] = tuple(MATCHINGS),
) -> list[str]:
    """Return a problem (one line) for each module of the MTP heads that an engine would build otherwise than the files
    have it.

    Args:
        is_quantized: for the modules in files, by name, whether they are quantized.
    """
    if quantization.method not in METHODS:
        return []
    problems: dict[str, None] = {}
    for head in range(Heads.from_config(hf_config).layers):
        in_files = head_modules(family, hf_config, head)
        for engine in engines:
            convention, matching = CONVENTIONS[engine](family), MATCHINGS[engine]
            if convention is None:
                continue
            for module in modules_of(convention, in_files, hf_config, head):
                stored = [is_quantized[name] for name in module.files if name in is_quantized]
                built = not module.is_plain and builds_quantized(quantization, matching, module, is_quantized)
                if len(set(stored)) > 1:
                    problems[_mixed_problem(module, is_quantized)] = None
                elif stored and stored[0] != built:
                    problems[_mismatch_problem(matching.label, module, stored[0], quantization.method)] = None
    return list(problems)


def modules_of(convention: Convention, in_files: HeadModules, hf_config: HfConfig, head: int) -> list[Module]:
    """Return the modules of a draft that the engine can build quantized."""
    block = engine_name(convention.block, hf_config, head)
    members: dict[str, list[str]] = {}
    for projection in in_files.projections:
        members.setdefault(_module_with(projection), []).append(projection)
    modules = []
    for name, parts in members.items():
        shards = [part for part in parts if ".experts." not in f".{part}" or ".experts.0." in f".{part}"]
        files = tuple(in_files.prefix + part for part in parts)
        whole, *own_shards = (block + renamed(part, convention.renames) for part in (name, *shards))
        modules.append(Module(whole, tuple(own_shards), files, is_plain=name in convention.plain))
    for template in convention.quantizes:
        name = engine_name(template, hf_config, head)
        modules.append(Module(name, (name,), (name,)))
    return modules


def builds_quantized(
    quantization: Quantization, matching: Matching, module: Module, is_quantized: Mapping[str, bool]
) -> bool:
    """Return whether an engine builds a module quantized.

    Args:
        is_quantized: for the modules in files, by name, whether they are quantized. vLLM reads the files for methods
            without a list.
    """
    method, content = quantization.method, quantization.content
    if method == "compressed-tensors":
        ignore: list[str] = content.get("ignore") or []
        if _are_ignored(ignore, module, matching):
            return False
        groups = (content.get("config_groups") or {}).values()
        return any(_is_target(target, module) for group in groups for target in group.get("targets", ()))
    if method == "modelopt":
        return not _is_excluded(content, module)
    if method == "gptq":
        for pattern in content.get("dynamic") or {}:
            if _matches_pattern(re.sub(r"^[+-]:", "", pattern), module.name):
                return not pattern.startswith("-:")
        listed = content.get("modules_in_block_to_quantize") or []
        if matching.reads_files:
            listed_names = [name for entry in listed for name in ([entry] if isinstance(entry, str) else entry)]
            names = listed_names or [name for name, quantized in is_quantized.items() if quantized]
            return any(name in module.shards[0] for name in names)
        return True
    not_converted: list[str] = content.get("modules_to_not_convert") or []
    if method == "fp8":
        not_converted = content.get("ignored_layers") or not_converted
        return not _are_listed(not_converted, module, matching)
    assert method == "awq"
    if matching.reads_files and not not_converted:
        not_converted = [name for name, quantized in is_quantized.items() if not quantized]
    compared_names = module.shards
    if matching.compares_parts or ".experts" in module.name:
        compared_names = (module.name,)
    return not all(any(entry in name for entry in not_converted) for name in compared_names)


def _are_ignored(ignore: Sequence[str], module: Module, matching: Matching) -> bool:
    """Return whether compressed-tensors' `ignore` contains a module: as a whole, or all of its shards."""

    def matches(name: str) -> bool:
        if matching.compares_parts and any(name.endswith(f".{entry}") for entry in ignore):
            return True
        return any(_matches(entry, name) for entry in ignore)

    is_expert = ".experts" in module.name  # engines compare only the shards
    return (matches(module.name) and not is_expert) or all(map(matches, module.shards))


def _is_excluded(content: Mapping[str, Any], module: Module) -> bool:
    """Return whether ModelOpt's quantization_config excludes a module: as a whole, or all of its shards.

    With several algorithms, only the modules in `quantized_layers` are quantized.
    """
    layers = content.get("quantized_layers")
    if layers and not any(name in layers for name in (module.name, *module.shards)):
        return True
    ignore: list[str] = content.get("ignore") or []
    if any(entry in module.name or fnmatchcase(module.name, entry) for entry in ignore):
        return True
    return all(shard in ignore for shard in module.shards)


def _is_target(target: str, module: Module) -> bool:
    return target == "Linear" or any(_matches(target, name) for name in (module.name, *module.shards))


def _matches(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return _matches_pattern(entry[3:], name)
    return entry == name


def _matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a regular expression of quantization_config matches the beginning of a name.

    Raises:
        UserError: the expression is invalid.
    """
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise UserError(
            f"config.json: quantization_config has the invalid pattern {pattern!r}: {error}", "correct or remove it"
        ) from None


def _are_listed(entries: Sequence[str], module: Module, matching: Matching) -> bool:
    """Return whether fp8's `modules_to_not_convert` contains a module."""
    if ".experts" in module.name and any(module.name in entry for entry in entries):
        return True
    names = module.shards
    if ".experts" in module.name or (not matching.compares_parts and module.name in entries):
        names = (module.name,)
    if not matching.compares_parts:
        return all(name in entries for name in names)
    parts = [f".{entry.removeprefix('model.')}." for entry in entries]
    return all(any(part in f".{name}." for part in parts) for name in names)


def _module_with(projection: str) -> str:
    """Return the module of engines that computes a projection of the files; both relative to the decoder layer."""
    experts = re.match(r"((?:.*\.)?experts)\.\d+\.", projection)
    if experts:
        return experts.group(1)
    return merged(projection, _FUSED)


def merged(module: str, fused: Mapping[str, tuple[str, ...]] = _FUSED | _FUSED_IN_TRUNK) -> str:
    """Return the name of the merged module that a module belongs to; its own name if engines do not merge it.

    The experts of a layer are separate modules.

    Args:
        fused: names of merged modules, each with those that it consists of.
    """
    parent, _, name = module.rpartition(".")
    for whole, shards in fused.items():
        if name in shards:
            return f"{parent}.{whole}"
    return module


def needs_whole_blocks(module: str) -> bool:
    """Return whether the matrix of a module must have whole blocks, because engines merge it with others.

    In a merged matrix, the rows of another matrix follow. In an expert, vLLM requires it of the last one as well.
    """
    name = module.rpartition(".")[2]
    for shards in _FUSED.values():
        if name in shards:
            return name != shards[-1] or ".experts." in module
    return False


def _mixed_problem(module: Module, is_quantized: Mapping[str, bool]) -> str:
    quantized = next(name for name in module.files if is_quantized.get(name))
    plain = next(name for name in module.files if is_quantized.get(name) is False)
    return f"{quantized} is quantized, but {plain}.weight is plain, and engines compute both in one module"


def _mismatch_problem(label: str, module: Module, is_quantized: bool, method: str) -> str:
    key = {"compressed-tensors": "ignore", "modelopt": "ignore", "gptq": "dynamic"}
    listed = f"quantization_config.{key.get(method, 'modules_to_not_convert')}"
    if is_quantized:
        return f"{module.files[0]} is quantized, but {label} builds {module.name} plain ({listed})"
    return f"{module.files[0]}.weight is plain, but {label} builds {module.name} quantized: it is not in {listed}"
