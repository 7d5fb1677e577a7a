"""Connect the judge, which executes tests, with the process of a program, so that only data reaches the judge.

Each process has a `Link`. A call is a line of JSON with a function and its arguments; the answer is a line with the
result. Values of the types in `_DATA` are copied. Any other object of the program stays in its process: the judge has a
`Remote`, which calls back for attributes and methods. The operands of `==`, `<` or `in` in a test are compared by the
judge, and are never sent to the program. This module imports only the standard library.
"""

import builtins
import io
import json
import operator
import socket
import sys
import types
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_MESSAGE = 64 * 1024**2

_DATA: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    list: (list, list),
    set: (list, set),
    frozenset: (list, frozenset),
    deque: (list, deque),
    bytes: (list, bytes),
    bytearray: (list, bytearray),
    Counter: (lambda value: list(value.items()), lambda pairs: Counter(dict(pairs))),
    OrderedDict: (lambda value: list(value.items()), OrderedDict),
    dict: (lambda value: list(value.items()), dict),
    range: (lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    slice: (lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts)),
    complex: (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    Decimal: (lambda value: [str(value)], lambda parts: Decimal(*parts)),
    Fraction: (lambda value: [value.numerator, value.denominator], lambda parts: Fraction(*parts)),
    datetime: (lambda value: [value.isoformat()], lambda parts: datetime.fromisoformat(*parts)),
    date: (lambda value: [value.isoformat()], lambda parts: date.fromisoformat(*parts)),
    timedelta: (lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts)),
}
"""Types of data: how a value becomes a list of its parts, and how it is built from them. A subclass becomes the first
type that it is an instance of."""
_BY_NAME = {kind.__name__: build for kind, (_, build) in _DATA.items()}
_MUTABLE = (list, dict, set, bytearray, deque)


class Ended(BaseException):
    """The other process has ended or has sent something that is not a message."""


class Link:
    """One end of the connection.

    Args:
        channel: socket to the other process.
        functions: functions that the other process can call by name. The judge has none, so the program can only call
            functions that a test passed as an argument.

    Attributes:
        is_broken: whether the other process has ended. A test may not take this for an exception that it expects.
    """

    def __init__(self, channel: socket.socket, functions: Mapping[str, Callable[..., Any]] | None = None):
        self.is_broken = False
        self._file = channel.makefile("rwb")
        self._functions = functions or {}
        self._is_judge = functions is None
        self._own: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._errors: dict[str, type[BaseException]] = {}

    def call(self, function: "str | Remote", *args: Any, **kwargs: Any) -> Any:
        """Call a function of the other process, and return its result or raise its exception.

        Arguments that the function changes in place are changed here, too.

        Raises:
            Ended: the other process has ended.
        """
        named = function if isinstance(function, str) else self._encode(function)
        self._send({"call": named, "args": self._encode([*args]), "kwargs": self._encode({**kwargs})})
        while "call" in (answer := self._receive()):
            self._serve(answer)
        try:
            values = [*args, *kwargs.values()]
            for position, changed in answer["changed"]:
                _restore(values[position], self._decode(changed))
            sys.stdout.write(answer["output"])
            if "error" in answer:
                kind, parts = self._decode(answer["error"])
            else:
                return self._decode(answer["result"])
        except Exception:
            raise self._broken() from None
        if kind is StopIteration and function != "next":  # would end a loop of the test, such as `all(map(f, items))`
            kind = RuntimeError
        raise _make_error(kind, parts)

    def serve(self) -> None:
        """Answer calls until the other process ends."""
        while True:
            self._serve(self._receive())

    def _serve(self, message: Mapping[str, Any]) -> None:
        output = io.StringIO()
        before, sys.stdout = sys.stdout, output  # a test may redirect sys.stdout in its process
        answer: dict[str, Any] = {"changed": []}
        try:
            named = message["call"]
            function = self._functions[named] if isinstance(named, str) else self._decode(named)
            if self._is_judge and not isinstance(function, types.FunctionType):
                raise TypeError("not a function of a test")
            args, kwargs = self._decode(message["args"]), self._decode(message["kwargs"])
            values = [*args, *kwargs.values()]
            encoded = list(map(self._encode, values))
            answer["result"] = self._encode(function(*args, **kwargs))
            changed = [number for number, value in enumerate(values) if isinstance(value, _MUTABLE)]
            changed = [number for number in changed if self._encode(values[number]) != encoded[number]]
            answer["changed"] = [[number, self._encode(values[number])] for number in changed]
        except Ended:
            raise
        except BaseException as error:  # also sys.exit()
            answer |= {"error": self._encode([type(error), _parts_of(error)])}
        finally:
            sys.stdout = before
        self._send(answer | {"output": output.getvalue()})

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(message).encode() + b"\n")
            self._file.flush()
        except OSError:
            raise self._broken() from None

    def _receive(self) -> dict[str, Any]:
        try:
            if self.is_broken:
                raise OSError("the connection has ended")
            message = json.loads(self._file.readline(MAX_MESSAGE))
            assert isinstance(message, dict)
        except (OSError, ValueError, AssertionError, RecursionError, MemoryError):
            raise self._broken() from None
        return message

    def _broken(self) -> Ended:
        self.is_broken = True
        return Ended()

    def _encode(self, value: Any) -> Any:
        """Return a value as JSON: a scalar as it is, anything else as a list that starts with a name.

        Raises:
            TypeError: an object of a test, which has no counterpart in the process of the program.
        """
        if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            items = value.tolist()  # a number for a scalar
            return ["ndarray", self._encode(items)] if isinstance(items, list) else self._encode(items)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if issubclass(type(value), tuple) and isinstance(fields := getattr(value, "_fields", None), tuple):
            return ["namedtuple", type(value).__name__, [*fields], *map(self._encode, value)]
        for kind, (parts_of, _) in _DATA.items():
            if isinstance(value, kind):
                return [kind.__name__, *map(self._encode, parts_of(value))]
        if isinstance(value, Remote):
            return ["yours", value._number]
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(kind for kind in value.__mro__ if _builtin(kind.__name__) is kind)
            return ["exception", value.__name__, base.__name__]
        if _builtin(getattr(value, "__name__", "")) is value:
            return ["builtin", value.__name__]
        if self._is_judge and not isinstance(value, types.FunctionType):
            raise TypeError(f"{type(value).__name__} cannot be passed to a program; tests pass data and functions")
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        kind = "coroutine" if isinstance(value, types.CoroutineType) else "mine"
        number = self._numbers.setdefault(id(value), len(self._own))
        if number == len(self._own):
            self._own.append(value)  # which also keeps its id from being used for another object
        return [kind, number]

    def _decode(self, value: Any) -> Any:
        """Return the value of what `_encode` returned, for untrusted JSON.

        Raises:
            KeyError, IndexError, TypeError, ValueError: it has another form.
        """
        if not isinstance(value, list):
            if isinstance(value, dict):
                raise ValueError("not a value")
            return value
        name, *parts = value
        if name in _BY_NAME:
            return _BY_NAME[name](list(map(self._decode, parts)))
        if name == "namedtuple":
            kind, fields, *values = parts
            return namedtuple(kind, fields)(*map(self._decode, values))  # checks that the names are identifiers
        if name == "ndarray":
            import numpy

            return numpy.array(self._decode(parts[0]))
        if name == "exception":
            return self._error(*parts)
        if name == "builtin":
            found = _builtin(parts[0])
            # A test may call a function that it was given, with text of the program, so `eval` is not accepted here.
            if self._is_judge and not isinstance(found, type):
                raise ValueError("not a type")
            return found
        if name == "module":
            return _Module(str(parts[0]))
        number = int(parts[0])
        if name == "yours":
            return self._own[number]
        remote = self._remotes.setdefault(number, Remote(self, number))
        return self._await(remote) if name == "coroutine" else remote

    async def _await(self, remote: "Remote") -> Any:
        return self.call("await", remote)

    def _error(self, name: str, base: str) -> type[BaseException]:
        """Return the exception with this name: a builtin, or a subclass of one for an exception of the program."""
        parent = _builtin(base)
        if not (isinstance(parent, type) and issubclass(parent, BaseException)):
            raise ValueError("not an exception")
        if name == base:
            return parent
        return self._errors.setdefault(name, type(str(name), (parent,), {}))


class _Module:
    """The name of a module that the program imported."""

    def __init__(self, name: str):
        self.name = name


_PREDICATES = {name for kind in (str, float, set) for name in dir(kind) if name.startswith(("is", "starts", "ends"))}


class Remote:
    """An object of the other process.

    Operators work only between two of them. A result such as `f(1) - 2.5`, where the test expects a number, would let
    an object of the program answer for the number; so would `in`, or `f(1).startswith("a")`.
    """

    def __init__(self, link: Link, number: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.call(self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in _PREDICATES:
            raise AttributeError(name)
        return self._link.call("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.call("setattr", self, name, value)

    def __exit__(self, *error: object) -> None:
        self._link.call("exit", self)

    def __instancecheck__(self, other: object) -> bool:
        return isinstance(other, Remote) and bool(self._link.call("isinstance", other, self))


def _forward(name: str, takes: type) -> Callable[..., Any]:
    """Return a special method that the other process executes, for other operands of one type only."""

    def method(self: Remote, *others: Any) -> Any:
        if not all(isinstance(other, takes) for other in others):
            return NotImplemented
        return self._link.call(name, self, *others)

    return method


_OF_ONE = {"len": len, "str": str, "repr": repr, "iter": iter, "next": next, "bool": bool, "int": int, "float": float}
_OF_ONE |= {"abs": abs, "hash": hash, "neg": operator.neg, "enter": lambda value: type(value).__enter__(value)}
_OF_ITEMS = {name: getattr(operator, name) for name in ("getitem", "setitem", "delitem")}
_OF_TWO = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_OF_TWO |= {name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul")}
_OF_TWO |= {name: getattr(operator, f"{name}_") for name in ("and", "or")} | {"xor": operator.xor}
for _name in _OF_ONE | _OF_ITEMS:
    setattr(Remote, f"__{_name}__", _forward(_name, object))
for _name in _OF_TWO:
    setattr(Remote, f"__{_name}__", _forward(_name, Remote))


def _run(coroutine: Any) -> Any:
    import asyncio  # only here, because it takes as long as the rest of a short program

    return asyncio.run(coroutine)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **_OF_ONE,
    **_OF_ITEMS,
    **_OF_TWO,
    "getattr": getattr,
    "setattr": setattr,
    "isinstance": isinstance,
    "exit": lambda value: type(value).__exit__(value, None, None, None),
    "await": _run,
}
"""Functions that the process of a program executes for the judge."""

ALIASES = {"np": "numpy", "pd": "pandas"}


def as_name_of_test(name: str, value: Any) -> Any:
    """Return what a name of a program means in tests; None if it keeps its meaning of Python.

    Tests rely on `abs`, and on `math` if the program imports it, so a program does not define these. A function that
    has the name of a module has no attributes.
    """
    if name.startswith("__") or hasattr(builtins, name):
        return None
    if isinstance(value, _Module):
        is_same = value.name == ALIASES.get(name, name) and _is_module(name)
        return __import__(value.name) if is_same else None
    if not _is_module(name):
        return value
    return value.__call__ if isinstance(value, Remote) else None


def _is_module(name: str) -> bool:
    return name in sys.stdlib_module_names or name in (*ALIASES, *ALIASES.values())


def _builtin(name: Any) -> Any:
    return getattr(builtins, name, _builtin) if isinstance(name, str) else _builtin


def _parts_of(error: BaseException) -> list[Any]:
    """Return the arguments of an exception as scalars."""
    return [part if part is None or isinstance(part, (bool, int, float, str)) else repr(part) for part in error.args]


def _make_error(kind: Any, parts: Any) -> BaseException:
    if not issubclass(kind, Exception):  # SystemExit, for example, would end the judge
        return RuntimeError(kind.__name__)
    try:
        return kind(*parts)
    except Exception:  # such as UnicodeDecodeError, which requires other arguments
        return RuntimeError(kind.__name__)


def _restore(value: Any, changed: Any) -> None:
    """Give a mutable argument the content that a call left in its copy."""
    if type(value) is not type(changed) or not isinstance(value, _MUTABLE):
        raise TypeError("not the same type")
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(changed)
    else:
        value.extend(changed)
