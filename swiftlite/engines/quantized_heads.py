"""Check that engines build the modules of MTP heads as the files have them: quantized or plain.

Otherwise an engine casts numbers to codes or codes to numbers, often without an error: the text is still correct, but
no draft is accepted. `families/serving/built.py` contains the rules of the engines.
"""

from collections.abc import Mapping, Sequence

from swiftlite.base.errors import UserError
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.entry import Entry
from swiftlite.bridge.tensors import Checkpoint, some
from swiftlite.engines.info import EngineInfo
from swiftlite.families.resolved import HfModel
from swiftlite.families.serving.built import head_problems
from swiftlite.families.serving.index import MATCHINGS
from swiftlite.families.serving.quantized import METHODS, head_modules, unlisted_engines

HINT = "export the run again, which lists the plain modules of the heads under the names of each engine"
_CODES = ("weight_packed", "qweight")


def quantized_modules(stored: Mapping[str, Entry]) -> dict[str, bool]:
    """Return for each module with a weight, by its name in files, whether the weight is quantized.

    Args:
        stored: the tensors of the files.
    """
    modules = {}
    for key, entry in stored.items():
        module, _, name = key.rpartition(".")
        if name in _CODES:
            modules[module] = True
        elif name == "weight":
            # int8 codes, or float8 ones, which torch counts as floating-point numbers.
            modules[module] = not entry.dtype.is_floating_point or entry.dtype.itemsize == 1
    return modules


def quantized_head_problems(model: HfModel, engines: Sequence[str] | None = None) -> list[str]:
    """Return a problem (one line) for each module of the heads that an engine would build otherwise than the files have
    it.

    Args:
        engines: names of engines; default: all engines for which quantization_config can describe these heads.
    """
    quantization = model.quantization
    if quantization is None or not model.heads.layers or quantization.method not in METHODS:
        return []
    modules = quantized_modules(Checkpoint(model.directory).stored)
    return problems_of(quantization, model, modules, engines)


def problems_of(
    quantization: Quantization, model: HfModel, modules: Mapping[str, bool], engines: Sequence[str] | None = None
) -> list[str]:
    """Return the result of `quantized_head_problems` for files with another quantization and other tensors.

    Args:
        model: a model with heads.
        modules: for each module with a weight, whether it is quantized.
    """
    if engines is None:
        unlisted = _unlisted(quantization, model, modules)
        engines = [engine for engine in MATCHINGS if engine not in unlisted]
    return head_problems(quantization, model.family, model.config, modules, engines)


def unsupported_engines(model: HfModel) -> list[str]:
    """Return the engines for which no quantization_config can describe the heads of a quantized model."""
    quantization = model.quantization
    if quantization is None or not model.heads.layers:
        return []
    return _unlisted(quantization, model, quantized_modules(Checkpoint(model.directory).stored))


def check_quantized_heads(model: HfModel, info: EngineInfo) -> None:
    """Check that an engine builds the modules of the heads as the files have them.

    Raises:
        UserError: it would build a module otherwise.
    """
    problems = quantized_head_problems(model, [info.name])
    if problems:
        lines = "\n  ".join(some(problems))
        hint = HINT
        if info.name in unsupported_engines(model):
            hint = f"no list can describe these heads for {info.label}; use another --infer_backend"
        raise UserError(f"--model {model.directory}: config.json does not describe the MTP heads:\n  {lines}", hint)


def _unlisted(quantization: Quantization, model: HfModel, modules: Mapping[str, bool]) -> list[str]:
    in_head = head_modules(model.family, model.config, 0)
    keeps_block = not any(modules.get(in_head.prefix + name) for name in in_head.projections)
    return unlisted_engines(quantization.method, model.family, model.config, keeps_block=keeps_block)
