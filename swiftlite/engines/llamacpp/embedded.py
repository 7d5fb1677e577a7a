"""Run the server of the package xllamacpp with options of llama-server.

    python -m swiftlite.engines.llamacpp.embedded --model FILE.gguf --port 8080 ...

Only the options in `OPTIONS` are supported.
"""

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

API_KEY = "LLAMA_API_KEY"
"""Environment variable from which llama-server reads keys, separated by commas."""
Setter = Callable[[Any, str], None]


def _attribute(path: str, convert: Callable[[str], Any]) -> Setter:
    """Return a function that sets an attribute of `CommonParams`, such as "speculative.draft.n_max"."""

    def set_it(params: Any, value: str) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            params = getattr(params, owner)
        setattr(params, name, convert(value))

    return set_it


def _package() -> Any:
    """Return the package, which has no type stubs."""
    return importlib.import_module("xllamacpp")


def _cache_type(value: str) -> Any:
    return getattr(_package().ggml_type, f"GGML_TYPE_{value.upper()}")


def _flash_attention(value: str) -> Any:
    names = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
    return getattr(_package().llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{names[value]}")


def _speculation(value: str) -> Any:
    names = [f"COMMON_SPECULATIVE_TYPE_{name.upper().replace('-', '_')}" for name in value.split(",")]
    return [getattr(_package().common_speculative_type, name) for name in names]


def _as_json(value: str) -> dict[str, str]:
    return {name: json.dumps(each) for name, each in json.loads(value).items()}


def _threads(params: Any, value: str) -> None:
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads = int(value)


OPTIONS: dict[str, Setter] = {
    "model": _attribute("model.path", str),
    "model-draft": _attribute("speculative.draft.mparams.path", str),
    "alias": _attribute("model_alias", lambda value: {value}),
    "host": _attribute("hostnames", lambda value: [value]),
    "port": _attribute("port", int),
    "parallel": _attribute("n_parallel", int),
    "ctx-size": _attribute("n_ctx", int),
    "batch-size": _attribute("n_batch", int),
    "ubatch-size": _attribute("n_ubatch", int),
    "gpu-layers": _attribute("n_gpu_layers", int),
    "threads": _threads,
    "cache-type-k": _attribute("cache_type_k", _cache_type),
    "cache-type-v": _attribute("cache_type_v", _cache_type),
    "cache-type-k-draft": _attribute("speculative.draft.cache_type_k", _cache_type),
    "cache-type-v-draft": _attribute("speculative.draft.cache_type_v", _cache_type),
    "flash-attn": _attribute("flash_attn_type", _flash_attention),
    "spec-type": _attribute("speculative.types", _speculation),
    "spec-draft-n-max": _attribute("speculative.draft.n_max", int),
    "spec-ngram-simple-size-n": _attribute("speculative.ngram_simple.size_n", int),
    "spec-ngram-simple-size-m": _attribute("speculative.ngram_simple.size_m", int),
    "spec-draft-sampling": _attribute("speculative.draft.probabilistic", lambda value: value == "probabilistic"),
    "chat-template-kwargs": _attribute("default_template_kwargs", _as_json),
    "api-key": _attribute("api_keys", lambda value: value.split(",")),
}
SWITCHES: dict[str, Callable[[Any], None]] = {
    "metrics": lambda params: setattr(params, "endpoint_metrics", True),
    "jinja": lambda params: setattr(params, "use_jinja", True),
    "no-warmup": lambda params: setattr(params, "warmup", False),
    "no-spec-draft-backend-sampling": lambda params: setattr(params.speculative.draft, "backend_sampling", False),
}


def main(words: list[str]) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        SystemExit: an option is not supported, or the server cannot start.
    """
    xllamacpp = _package()
    params = xllamacpp.CommonParams()
    params.fit_params = False  # would change the context length to fit free memory
    # Before the options, so that --api-key has precedence, as in llama-server.
    if API_KEY in os.environ:
        OPTIONS["api-key"](params, os.environ[API_KEY])
    remaining = list(words)
    while remaining:
        name = remaining.pop(0).removeprefix("--")
        if name in SWITCHES:
            SWITCHES[name](params)
        elif name in OPTIONS and remaining:
            OPTIONS[name](params, remaining.pop(0))
        else:
            sys.exit(
                f"--{name} is not supported by the package xllamacpp; use an executable: LLAMA_SERVER=FILE. "
                f"Supported: {', '.join([*OPTIONS, *SWITCHES])}"
            )
    # The server runs in threads of the library, so the main thread only waits for a signal.
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        sys.exit(f"llama.cpp: {error}")
    print(f"listening on {server.listening_address}", flush=True)
    ended.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
