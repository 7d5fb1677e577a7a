"""Replace functions of vLLM where it has no hook."""

from collections.abc import Callable
from functools import wraps
from typing import Any

_DONE: set[tuple[Any, str, Callable[..., Any]]] = set()


def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function of a class or module of vLLM. A second call with the same `call` has no effect; with another
    one, replacements nest, and the last one is called first.

    Args:
        call: function that is called instead, with vLLM's function before the arguments.
    """
    if (owner, name, call) in _DONE:
        return
    _DONE.add((owner, name, call))
    stock = getattr(owner, name)

    @wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return call(stock, *args, **kwargs)

    setattr(owner, name, replacement)
