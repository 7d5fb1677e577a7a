"""Define `EngineInfo`, the description of an engine. It is available without importing the engine.

Commands, rules and messages iterate over all `EngineInfo`s (`index.py`) and do not refer to an engine by name.
Functions and classes that require torch or the engine are strings "module:attribute", which are imported when they are
used.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Literal

from swiftlite.args.config import Problem
from swiftlite.args.docs import options
from swiftlite.base.errors import UserError
from swiftlite.base.heads import MTP, kind_of
from swiftlite.bridge.encoding.quantization import Quantization
from swiftlite.bridge.rows import HfConfig
from swiftlite.families import Family
from swiftlite.families.drafters import DRAFTERS, DrafterOptions, with_drafter
from swiftlite.families.serving.convention import Convention
from swiftlite.families.serving.index import CONVENTIONS
from swiftlite.runtime.environment import has_bfloat16_instructions, sees_gpu


@dataclass(frozen=True)
class Plugin:
    """swiftlite's plugin for an engine, which the engine loads in each of its processes.

    Attributes:
        entry_point: "module:function", as in pyproject.toml.
        group: group of entry points in which the engine looks for plugins.
        variable: environment variable with which a user can restrict the plugins that the engine loads.
    """

    entry_point: str
    group: str
    variable: str


@dataclass(frozen=True)
class EngineInfo:
    """One engine.

    Attributes:
        name: the engine's name in --infer_backend.
        label: the engine's official name.
        package: name of the Python package; the engine is installed if this package is.
        locate: name of a function that returns the command of the engine's program, or None if it is not installed. If
            "", the engine is the package.
        distributions: possible names of the package's pip distribution.
        install: command to install the package.
        adapter: name of the `Engine` class, which is called with an `EngineConfig`.
        measured: prefix of the engine's version with which conventions were measured; "" if conventions are the same in
            all versions.
        is_required: whether the package is a dependency of swiftlite.
        takes_draft_confidence: whether the engine supports `Sampling.draft_confidence`.
        draws_rollouts: whether the adapter accepts new weights (`train.live_weights.Receiver`) and reports the
            log-probabilities of sampled tokens, for `megatron grpo`.
        sampling_options: options of `SamplingArgs` that the adapter supports.
        sampling_options_without_drafts: those of them that it supports only without drafts.
        filters_log_p: whether reported log-probabilities are those after all filters, such as top-p.
        can_sleep: whether the adapter can free its GPU memory between calls (`EngineConfig.sleeps`) and receive weights
            from a trainer on its GPU ("ipc").
        takes_draft_schedule: whether the adapter supports `EngineConfig.draft_schedule`.
        server_takes_draft_schedule: whether the server supports --draft_schedule.
        joins_ngrams: whether the adapter and the server support drafts from the text (`ngram.py`) as well.
        drafts_without_heads: whether they support drafts from the text alone.
        drafters: kinds of drafters with which the engine drafts (`families/drafters.py`).
        gpu_drafters: those of them with which it drafts only on a GPU.
        drafts_with_windows: whether it drafts with drafters other than MTP heads for trunks with sliding windows.
        takes_live_weights: whether the engine's server accepts new weights while serving.
        logs_requests: whether the engine's server supports the middleware of `request_log`.
        serves_adapters: whether the engine's server supports adapters. Tests check that it gives the answers of the
            merged model.
        is_batched: whether the engine processes several prompts at once.
        supports_images: whether the adapter supports prompts with images.
        image_packages: packages that the engine requires for images, in addition to `package`.
        image_install: command to install `image_packages`.
        memory_option: keyword argument of the engine for its share of a GPU's memory; "" if it takes what it needs.
        without_draft_vocab: kinds of drafters of which the engine does not use the draft vocabulary, with which drafts
            are cheaper.
        emulates_bfloat16: whether the engine is slower in bfloat16 than in float32 on a processor without instructions
            for bfloat16.
        options_class: class of the engine's own options in args/fields.py, a base class of the commands' option
            classes; None if the engine has no options. The name of each option starts with the engine's name, and
            those of speculative decoding with ENGINE_speculative.
        rules: functions that yield (problem, hint) for invalid options.
        server: name of the function that returns a `ServerCommand`, in which `--port` precedes the port; its arguments
            are `DeployArgs`, an `HfModel`, whether the server drafts, and a `DraftSchedule` or None. If "", `deploy`
            does not support the engine.
        client: name of the `Client` that `bench` uses. If "", `bench` does not support the engine.
        metrics_prefix: prefix of the names of the engine's metrics in /metrics of its server, which identifies the
            engine; "" if the engine has no server.
        counts_drafts: whether /metrics has counters of drafts (`server/metrics.py`), which `evaluate --server` reads.
        counts_per_request: keyword arguments of the engine with which its server counts the drafts of each request;
            empty if it always does.
        measures_requests: whether /metrics has the counters of `Throughput`, and the server returns log-probabilities
            of prompts, for `evaluate --tasks`.
        dry_load: name of the function that maps an `EngineConfig` to a `LoadReport`; it is called in a subprocess. If
            "", `doctor` does not support the engine.
        file_report: name of the function that maps a file which the engine reads to a `LoadReport`. If "", the engine
            reads only Hugging Face directories.
        known_report: name of the function that maps an `HfModel` to a `LoadReport` if the engine is not installed. If
            "", this is not supported.
        command_needs_no_install: whether the server's command can be printed without an installed engine.
        plugin: plugin that the engine needs to serve swiftlite's checkpoints; None if the engine needs no plugin.
        drawing_problem: name of the function that returns why this engine verifies drafts incorrectly at a temperature
            above 0 on this machine; it returns None if verification is correct. If "", verification is always correct.
        families: name of the collection with the names of the families that the engine runs. If "", these are all
            families.
        drafting_problem: name of the function that maps a `Family` and the content of config.json to the reason why the
            engine does not draft with the declared drafter, or with an MTP head if none is declared; "" if it does. If
            "", `drafters` and the trunks of their kinds say everything.
    """

    name: str
    label: str
    package: str
    distributions: tuple[str, ...]
    install: str
    adapter: str
    locate: str = ""
    measured: str = ""
    is_required: bool = False
    takes_draft_confidence: bool = False
    serves_adapters: bool = False
    draws_rollouts: bool = False
    sampling_options: tuple[str, ...] = ("top_p", "top_k", "min_p", "repetition_penalty", "stop_strings")
    sampling_options_without_drafts: tuple[str, ...] = ()
    filters_log_p: bool = True
    can_sleep: bool = False
    takes_draft_schedule: bool = False
    server_takes_draft_schedule: bool = True
    joins_ngrams: bool = False
    drafts_without_heads: bool = False
    drafters: tuple[str, ...] = (MTP,)
    gpu_drafters: tuple[str, ...] = ()
    drafts_with_windows: bool = True
    takes_live_weights: bool = False
    logs_requests: bool = False
    is_batched: bool = True
    supports_images: bool = False
    image_packages: tuple[str, ...] = ()
    image_install: str = ""
    memory_option: str = ""
    without_draft_vocab: tuple[str, ...] = ()
    emulates_bfloat16: bool = False
    options_class: type | None = None
    rules: tuple[Callable[[Any], Iterator[Problem]], ...] = ()
    server: str = ""
    client: str = ""
    metrics_prefix: str = ""
    counts_drafts: bool = False
    counts_per_request: Mapping[str, Any] = field(default_factory=dict)
    measures_requests: bool = False
    dry_load: str = ""
    file_report: str = ""
    known_report: str = ""
    command_needs_no_install: bool = False
    plugin: Plugin | None = None
    drawing_problem: str = ""
    families: str = ""
    drafting_problem: str = ""

    @property
    def is_installed(self) -> bool:
        if self.locate:
            return resolve_name(self.locate)() is not None
        return importlib.util.find_spec(self.package) is not None

    @property
    def fastest_dtype(self) -> Literal["bfloat16", "float32"]:
        """The --torch_dtype with which the engine is fastest on this machine."""
        if self.emulates_bfloat16 and not sees_gpu() and not has_bfloat16_instructions():
            return "float32"
        return "bfloat16"

    def shares_gpu(self, kwargs: Mapping[str, Any] | None) -> bool:
        """Return whether the adapter can sleep, and uses a single GPU with these keyword arguments of the user."""
        sizes = [(kwargs or {}).get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline", "data")]
        return self.can_sleep and max(sizes) == 1

    def runs(self, family: str) -> bool:
        """Return whether the engine runs the trunk of a family."""
        return not self.families or family in resolve_name(self.families)

    def why_no_drafts(self, family: Family, hf_config: HfConfig) -> str:
        """Return the result of `drafting_problem` for a model; empty without such a function."""
        return resolve_name(self.drafting_problem)(family, hf_config) if self.drafting_problem else ""

    def requires_gpu(self, drafter: str) -> bool:
        """Return whether the installed engine does not draft with a kind of drafter because there is no GPU."""
        return drafter in self.gpu_drafters and self.is_installed and not sees_gpu()

    def drafts_for(self, family: str, drafter: str) -> bool:
        """Return whether the engine drafts with a kind of drafter for the trunk of a family."""
        return drafter in self.drafters and family in self._trunks(drafter, family)

    def _trunks(self, drafter: str, family: str) -> Collection[str]:
        """Return the families for whose trunk the engine drafts with a kind of drafter, among them `family` if there is
        no list."""
        return getattr(DRAFTERS[drafter], f"{self.name}_trunks", (family,))

    def why_no_drafter(self, family: Family, hf_config: HfConfig, drafter: str) -> str:
        """Return why the engine would not draft with a new drafter (`NEW` in `families/drafters.py`) for a model; empty
        if it would.
        """
        if Quantization.of(hf_config) is not None:
            return "it does not support quantized models"
        declared = with_drafter(hf_config, DrafterOptions(drafter))
        name = kind_of(declared)
        kind = DRAFTERS[name]
        if name not in self.drafters:
            return f"{self.label} does not support it"
        if self.requires_gpu(name):
            return f"{self.label} supports it only on a GPU"
        if reason := kind.why_not(family, declared):
            return reason
        attentions = family.architecture(declared).attentions
        if not self.drafts_with_windows and any(each.window is not None for each in attentions):
            return f"{self.label} does not support it for a trunk with a sliding window"
        if not self.drafts_for(family.name, name):
            return f"{self.label} supports it only for {', '.join(self._trunks(name, family.name))}"
        return self.why_no_drafts(family, declared)

    @property
    def kwargs_option(self) -> str:
        """Name of the option for the engine's keyword arguments."""
        return f"{self.name}_engine_kwargs"

    @property
    def option_names(self) -> tuple[str, ...]:
        """Names of the engine's options."""
        if self.options_class is None:
            return ()
        return tuple(options(self.options_class))

    @property
    def speculative_option_names(self) -> tuple[str, ...]:
        """Names of the engine's options for speculative decoding."""
        return tuple(name for name in self.option_names if name.startswith(f"{self.name}_speculative"))

    @property
    def keyword_option_names(self) -> tuple[str, ...]:
        """Options named `ENGINE_KEYWORD`, where KEYWORD is a keyword argument of the engine."""
        others = (self.kwargs_option, *self.speculative_option_names)
        return tuple(name for name in self.option_names if name not in others)

    def has_options_in(self, args: Any) -> bool:
        """Return whether a command has the engine's options."""
        return self.options_class is not None and isinstance(args, self.options_class)

    def engine_kwargs(self, args: Any) -> dict[str, Any]:
        """Return the keyword arguments for the engine that the user set, including those with an option."""
        if not self.has_options_in(args):
            return {}
        kwargs = dict(vars(args)[self.kwargs_option] or {})
        for name in self.keyword_option_names:
            if vars(args)[name] is not None:
                kwargs[name.removeprefix(f"{self.name}_")] = vars(args)[name]
        return kwargs

    def speculative_config(self, args: Any) -> dict[str, Any] | None:
        """Return the speculative options that the user set, under the engine's names; None if the user set none.

        An option ENGINE_speculative_config contains them all.
        """
        if not self.has_options_in(args):
            return None
        given = {name.removeprefix(f"{self.name}_"): vars(args)[name] for name in self.speculative_option_names}
        given = {name: value for name, value in given.items() if value is not None}
        return given.get("speculative_config", given or None)

    def problems(self, args: Any) -> Iterator[Problem]:
        """Yield the problems found by the engine's own rules."""
        if self.has_options_in(args):
            for rule in self.rules:
                yield from rule(args)

    def check_temperature(self, temperature: float) -> None:
        """Check that drafts are verified correctly at a temperature.

        Raises:
            UserError: this engine verifies drafts incorrectly at this temperature.
        """
        if temperature <= 0 or not self.drawing_problem:
            return
        if problem := resolve_name(self.drawing_problem)():
            raise UserError(
                f"--temperature {temperature} is not supported with drafts: {problem}",
                "use --temperature 0, --speculative none, or --infer_backend transformers",
            )

    def convention_for(self, family: Family) -> Convention:
        """Return the convention with which the engine runs the heads of a family.

        It is that of `families/serving/index.py`.

        Raises:
            UserError: the convention was not measured.
        """
        found = CONVENTIONS[self.name](family)
        if found is None:
            raise UserError(
                f"{self.label} is not supported for MTP heads of {family.name}: its inputs of the heads are unknown",
                "use another --infer_backend, or measure it and add it to Family.serving (docs/en/add-a-family.md)",
            )
        return found
