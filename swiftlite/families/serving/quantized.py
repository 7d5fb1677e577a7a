"""List the modules of MTP heads that are not quantized, with the names that each engine gives to them.

An engine builds a draft with the quantization_config of the trunk. If a plain tensor is loaded into a module that was
built quantized, the engine casts it to the dtype of the codes and leaves the scale uninitialized, often without an
error: the text is still correct, but no draft is accepted. The lists in quantization_config contain names of the
engine's modules, which differ from the names of tensors in files for some families.

    compressed-tensors  `ignore`                  whole names, or regular expressions after "re:"
    fp8                 `modules_to_not_convert`  whole names in vLLM, parts of names between dots in SGLang
    gptq                `dynamic`                 regular expressions after "-:"
    awq                 `modules_to_not_convert`  substrings of names
    modelopt            `ignore`                  names in which * stands for any text; in vLLM also substrings
    mxfp4               none: the drafts of swiftlite's plugins build the heads plain

`built.py` determines which modules an engine builds quantized. Tests compare both with the modules that vLLM 0.32
builds, and with those that SGLang 0.5.23 builds for FP8 blocks. For other methods, which SGLang builds only on GPUs,
they are compared with its functions that compare names, except for experts.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from swiftlite.base.errors import UserError
from swiftlite.base.heads import Heads
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.rows import HfConfig, Row, renamed, shapes_of
from swiftlite.families import Family
from swiftlite.families.serving.convention import Convention
from swiftlite.families.serving.index import CONVENTIONS, MATCHINGS

METHODS = ("compressed-tensors", "fp8", "gptq", "awq", "modelopt")
"""Values of `Quantization.method` whose lists are known: each has a branch in `with_heads_kept` and in
`built.builds_quantized`."""


@dataclass(frozen=True)
class HeadModules:
    """The modules with a matrix in one MTP head.

    Attributes:
        prefix: prefix of the head's decoder layer in files.
        projections: projections of attention and MLP, relative to `prefix`. In a quantized head, they are quantized.
        selectors: modules that select or weight experts, attention heads or tokens, relative to `prefix`: routers,
            gates and indexers. They are always plain.
        others: names in files of the modules outside of the decoder layer: the projection that joins embedding and
            hidden state, and copies of the trunk's embedding and output layer. They are always plain.
    """

    prefix: str
    projections: tuple[str, ...]
    selectors: tuple[str, ...]
    others: tuple[str, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The beginnings of `projections`, such as "self_attn."."""
        return tuple(dict.fromkeys(name.partition(".")[0] + "." for name in self.projections))


def head_modules(family: Family, hf_config: HfConfig, head: int) -> HeadModules:
    """Return the modules of MTP head number `head`, from 0."""
    inside = _matrices(family.block_rows(hf_config))
    others = _matrices(family.mtp.frame_rows(hf_config, head))
    copies = [name.removesuffix(".weight") for name in family.mtp.copies(hf_config, head)]
    return HeadModules(
        prefix=family.mtp.block(hf_config, head),
        projections=tuple(name for name in inside if not is_selector(name)),
        selectors=tuple(name for name in inside if is_selector(name)),
        others=(*others, *copies),
    )


def engine_name(template: str, hf_config: HfConfig, head: int) -> str:
    """Return a name or prefix of a `Convention` for one head."""
    return template.format(head=head, layer=hf_config["num_hidden_layers"] + head)


def experts_as_one(names: Iterable[str]) -> list[str]:
    """Return the names with the projections of all experts replaced by the module that contains the experts."""
    return list(dict.fromkeys(re.sub(r"((?:^|\.)experts)\.\d+\..*", r"\1", name) for name in names))


def _with_latent(names: Iterable[str]) -> list[str]:
    """Add SGLang's name of the module that computes the first projections of latent attention.

    Its class for GLM-4.7-Flash has no list of the projections in this module.
    """
    latent = [re.sub(r"q_a_proj$", "fused_qkv_a_proj_with_mqa", name) for name in names]
    return list(dict.fromkeys([*names, *latent]))


def _in_engines(names: list[str], family: Family) -> list[str]:
    """Add the names of modules in engines that have other names than the files."""
    conventions = [CONVENTIONS[engine](family) for engine in MATCHINGS]
    own = [renamed(name, known.renames) for known in conventions if known for name in names]
    return list(dict.fromkeys([*names, *own]))


def with_heads_kept(
    quantization: Quantization, family: Family, hf_config: HfConfig, *, keeps_block: bool
) -> Quantization:
    """Return a quantization that also lists the plain modules of the MTP heads.

    All engines then build these modules plain, except those in `unlisted_engines`. Other modules are not affected.

    Args:
        quantization: that of the trunk.
        hf_config: config.json, which declares the heads.
        keeps_block: whether the decoder layers of the heads are plain. Otherwise the projections of their attention and
            MLP, including experts, are quantized like the trunk.

    Raises:
        UserError: lists of this method are unknown.
    """
    method, content = quantization.method, quantization.content
    if method == "mxfp4":
        return quantization
    if method not in METHODS:
        raise UserError(
            f"config.json: quantization_config of {method}: its lists of modules are unknown",
            f"use a model that is quantized with one of these methods: {', '.join(METHODS)}",
        )
    blocks, names = _plain(family, hf_config, keeps_block, method)
    result = dict(content)
    if method == "compressed-tensors":
        result["ignore"] = _added(content.get("ignore"), [f"re:{re.escape(block)}.*" for block in blocks] + names)
    elif method == "modelopt":
        result["ignore"] = _added(content.get("ignore"), [f"{block}*" for block in blocks] + names)
    elif method == "gptq":
        patterns = [f"-:{re.escape(block)}.*" for block in blocks] + [f"-:{re.escape(name)}$" for name in names]
        result["dynamic"] = {pattern: {} for pattern in patterns} | dict(content.get("dynamic") or {})
    elif method == "fp8":
        key = "modules_to_not_convert"
        if content.get("ignored_layers"):
            key = "ignored_layers"  # engines read it first
        in_block = _with_latent(experts_as_one(head_modules(family, hf_config, 0).projections))
        whole = [block + name for block in blocks for name in _in_engines(in_block, family)]
        result[key] = _added(content.get(key), whole + names)
    else:
        assert method == "awq"
        # Without a list, vLLM takes it from the files, whose names can differ, and SGLang quantizes all modules.
        listed = content.get("modules_to_not_convert") or _plain_in_trunk(family, hf_config)
        result["modules_to_not_convert"] = _added(listed, blocks + names)
    return Quantization(result)


def unlisted_engines(method: str, family: Family, hf_config: HfConfig, *, keeps_block: bool) -> list[str]:
    """Return the engines for which no quantization_config can describe these heads.

    For example, SGLang's draft for Qwen3-Next gives its layer the names of the trunk's first layer.

    Args:
        method: `Quantization.method`.
        keeps_block: whether the decoder layers of the heads are plain.
    """
    conventions = {engine: CONVENTIONS[engine](family) for engine in MATCHINGS}
    if not keeps_block:
        is_looked_up = {engine: method == "gptq" and matching.reads_files for engine, matching in MATCHINGS.items()}
        return [
            engine
            for engine, known in conventions.items()
            if known and (known.plain or (known.has_own_names and is_looked_up[engine]))
        ]
    return [engine for engine, known in conventions.items() if known and _is_ambiguous(known, hf_config, method)]


def _is_ambiguous(convention: Convention, hf_config: HfConfig, method: str) -> bool:
    """Return whether an entry for a draft's decoder layer would also apply to the trunk."""
    block = engine_name(convention.block, hf_config, 0)
    in_trunk = block.startswith("model.layers.") and not block.startswith(f"model.layers.{_next_layer(hf_config)}.")
    # Without a prefix, only a regular expression can exclude the trunk, because it is compared from the start.
    return in_trunk or (block == "" and method in ("fp8", "awq"))


def _next_layer(hf_config: HfConfig) -> int:
    return hf_config["num_hidden_layers"]


def _plain(family: Family, hf_config: HfConfig, keeps_block: bool, method: str) -> tuple[list[str], list[str]]:
    """Return what is plain in the heads, with the names in files and in all engines: prefixes of decoder layers, and
    names of modules.
    """
    blocks: dict[str, None] = {}
    names: dict[str, None] = {}
    for head in range(Heads.from_config(hf_config).layers):
        modules = head_modules(family, hf_config, head)
        prefixes = [modules.prefix]
        for engine in MATCHINGS:
            convention = CONVENTIONS[engine](family)
            if convention and not _is_ambiguous(convention, hf_config, method):
                prefixes.append(engine_name(convention.block, hf_config, head))
                names |= dict.fromkeys(engine_name(name, hf_config, head) for name in convention.quantizes)
        for prefix in prefixes:
            names |= dict.fromkeys(prefix + name for name in modules.selectors)
            if keeps_block:
                blocks |= dict.fromkeys([prefix] if prefix else modules.parts)
        names |= dict.fromkeys(modules.others)
    if keeps_block:
        names = {name: None for name in names if not name.startswith(tuple(blocks)) or method == "fp8"}
    return list(blocks), list(names)


def _plain_in_trunk(family: Family, hf_config: HfConfig) -> list[str]:
    """Return the modules of the trunk that a list must contain: routers, gates, indexers, and a vision tower."""
    selectors = [name for name in _matrices(family.trunk_rows(hf_config)) if is_selector(name)]
    if family.vision is None:
        return selectors
    return [*selectors, "visual"]


def _matrices(rows: Iterable[Row]) -> list[str]:
    """Return the names of the modules with a weight of two dimensions."""
    shapes = shapes_of(rows)
    return [key.removesuffix(".weight") for key, shape in shapes.items() if key.endswith(".weight") and len(shape) == 2]


def is_selector(module: str) -> bool:
    """Return whether a module selects or weights experts or attention heads, or belongs to an indexer, which selects
    tokens.

    Except for "g_proj", a gate per attention head, and "router.proj", names with "proj" are those of projections.
    """
    parts = module.split(".")
    is_gate = parts[-1] in ("gate", "router", "shared_expert_gate", "g_proj")
    return is_gate or "indexer" in parts or parts[-2:] == ["router", "proj"]


def _added(listed: list[str] | None, entries: list[str]) -> list[str]:
    return list(dict.fromkeys([*(listed or []), *entries]))
