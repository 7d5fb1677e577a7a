"""Define a tensor on `cuda:0` that contains a CPU tensor, and compute operations on such tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from tests.cuda_emulated.record import RECORDER

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten


class Generator(torch.Generator):
    """Replaces torch.Generator, which cannot be created for the emulated device.

    Random numbers for the CPU and for the emulated device are drawn on the CPU.
    """

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return super().__new__(cls)

    def __init__(self, device: Any = "cpu") -> None:
        self.is_on_device = is_cuda(device)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA if self.is_on_device else CPU


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


GENERATOR = Generator(CUDA)
"""The default random number generator of the emulated device."""
_given: list[Generator] = []
"""Generators that were passed to calls which draw on the device, see `Functions`."""

# The host needs a value, or as many entries as a value says.
WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.masked_select.out,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}
# By masks of bool: how many entries there are must be known; setting one number is a kernel.
INDEXING = {aten.index.Tensor, aten._index_put_impl_.default, aten.index_put.default, aten.index_put_.default}
# Numbers on the host are read by these kernels as arguments; by all that follow torch's TensorIterator.
NO_NUMBERS = ("aten._foreach", "aten.cat", "aten.stack", "aten.mm", "aten.bmm", "aten.addmm", "aten.index_", "c10d.")
# Nothing is computed.
NO_KERNEL = ("aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "aten.resize_")


class CudaTensor(torch.Tensor):
    """A tensor whose device is `cuda:0`.

    Attributes:
        host: the CPU tensor with the numbers. Views have views of it.
    """

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor) -> "CudaTensor":
        tensor = torch.Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=CUDA,
        )
        tensor.host = host
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.host!r} on {CUDA}"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        return dispatch(func, args, kwargs or {})


class OnDevice(TorchDispatchMode):
    """Creates tensors on the device, and observes all operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def to_host(tree: Any) -> Any:
    """Return the arguments of an operation, with CPU tensors instead of emulated tensors."""
    kind = type(tree)
    if kind is CudaTensor:
        return tree.host
    if kind is list or kind is tuple:
        return kind([to_host(item) for item in tree])
    if kind is dict:
        return {name: to_host(item) for name, item in tree.items()}
    return tree


def to_device(tree: Any) -> Any:
    """Return the results of an operation as tensors on the emulated device."""
    if isinstance(tree, torch.Tensor):
        return CudaTensor(tree) if tree.device.type == "cpu" else tree
    if isinstance(tree, (list, tuple)):
        return type(tree)([to_device(item) for item in tree])
    return tree


def leaves_of(tree: Any) -> list[Any]:
    if isinstance(tree, (list, tuple)):
        leaves = []
        for item in tree:
            leaves += leaves_of(item)
        return leaves
    return [tree]


def dispatch(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the device of its arguments."""
    if handler := HANDLERS.get(func):
        return handler(func, args, kwargs)
    leaves = leaves_of([args, list(kwargs.values())])
    has_cuda = any(type(leaf) is CudaTensor for leaf in leaves)
    target = kwargs.get("device")
    is_on_device = has_cuda if target is None else is_cuda(target)
    if not has_cuda and not is_on_device:
        return func(*args, **kwargs)

    schema = schema_of(func)
    check_generator(leaves, schema)
    if has_cuda:
        if func in INDEXING:
            check_indexing(schema, args)
        else:
            check_devices(schema, leaves)
        if _waits(func, args, kwargs):
            RECORDER.note("wait", schema.name)
    if is_cuda(target):
        kwargs = kwargs | {"device": CPU}
    if is_on_device and schema.has_generator:
        kwargs = kwargs | {"generator": _given[-1] if _given else GENERATOR}
    out = func(*to_host(args), **to_host(kwargs))
    if not is_on_device:
        return out
    if schema.is_kernel:
        _look_at(schema.name, out)
    return _alias(func, schema, args, kwargs, out)


@dataclass(frozen=True)
class Schema:
    """Properties of an operation.

    Attributes:
        is_view: whether its results are views of its first argument.
        written: for each result that is an argument which is written to, the argument's position and name; () without
            one.
    """

    name: str
    is_kernel: bool
    is_view: bool
    has_generator: bool
    written: tuple[tuple[int, str], ...]


@cache
def schema_of(func: Any) -> Schema:
    arguments, returns = func._schema.arguments, func._schema.returns
    aliases = [result.alias_info for result in returns]
    is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    written = []
    for alias in aliases:
        if alias is not None and alias.is_write:
            sets = [argument.alias_info.before_set if argument.alias_info else set() for argument in arguments]
            place = next(place for place, of_argument in enumerate(sets) if of_argument & alias.before_set)
            written.append((place, arguments[place].name))
    name = str(func)
    is_kernel = not is_view and func is not aten._unsafe_view.default and not name.startswith(NO_KERNEL)
    has_generator = any(argument.name == "generator" for argument in arguments)
    return Schema(name, is_kernel, is_view, has_generator, tuple(written))


def _alias(func: Any, schema: Schema, args: tuple, kwargs: dict[str, Any], out: Any) -> Any:
    """Return the results on the device.

    Views share storage with their base, and a written argument is returned itself.
    """
    if schema.written:
        if torch.Tag.inplace_view in func.tags:
            return return_and_correct_aliasing(func, args, kwargs, to_device(out))
        found = tuple(args[place] if place < len(args) else kwargs[name] for place, name in schema.written)
        return found[0] if len(found) == 1 else found
    result = to_device(out)
    if schema.is_view:
        for view in leaves_of(result):
            torch._functionalize_unsafe_set(view, args[0])  # type: ignore[attr-defined]
    return result


def _look_at(name: str, out: Any) -> None:
    """Count a kernel, and check its result."""
    RECORDER.launch(name)
    for tensor in leaves_of(out):
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float64 and tensor.numel() >= 64:
            RECORDER.note("float64", name)


def check_devices(schema: Schema, leaves: list[Any]) -> None:
    """Reject combinations of devices that CUDA rejects.

    Raises:
        RuntimeError: CUDA's error.
    """
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, CudaTensor) or leaf.device.type != "cpu":
            continue
        if leaf.dim() > 0 or schema.name.startswith(NO_NUMBERS):
            refuse(schema)


def refuse(schema: Schema) -> None:
    """Raise CUDA's error for tensors on different devices.

    Raises:
        RuntimeError: always.
    """
    event = RECORDER.note("mixed", schema.name)
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
        f"({schema.name}, {event.line})"
    )


def check_generator(leaves: list[Any], schema: Schema) -> None:
    """Reject a CPU generator.

    Raises:
        RuntimeError: CUDA's error.
    """
    for leaf in leaves:
        if isinstance(leaf, torch._C.Generator):
            event = RECORDER.note("generator", schema.name)
            raise RuntimeError(
                f"Expected a 'cuda' device type for generator but found 'cpu' ({schema.name}, {event.line})"
            )


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in INDEXING:
        return _counts_a_mask(func, args)
    return func in WAITING and kwargs.get("output_size") is None  # of repeat_interleave


def _counts_a_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the number of entries of a mask must be known.

    Indices on the host are copied to the device first.
    """
    indices = [index for index in args[1] if index is not None]
    for index in indices:
        if type(index) is not CudaTensor and not is_pinned(index):
            RECORDER.note("unpinned", str(func))
    if not any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return False
    if func is aten.index.Tensor:
        return True
    # One number of the host where a mask says is masked_fill (native/TensorAdvancedIndexing.h).
    is_fill = type(args[2]) is not CudaTensor and args[2].numel() == 1 and len(indices) == 1
    return not is_fill


def check_indexing(schema: Schema, args: Any) -> None:
    """Reject tables and values on the host. Indices on the host are allowed."""
    values = args[2] if len(args) > 2 else args[0]
    if type(args[0]) is not CudaTensor or not (type(values) is CudaTensor or values.dim() == 0):
        refuse(schema)


# --- copies ---

_pinned: dict[int, StorageWeakRef] = {}


def pin(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    _pinned[storage.data_ptr()] = StorageWeakRef(storage)
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    found = _pinned.get(tensor.untyped_storage().data_ptr())
    return tensor.numel() == 0 or (found is not None and not found.expired())


def _pin_memory(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    assert not isinstance(args[0], CudaTensor), "only dense CPU tensors can be pinned"
    return pin(args[0].clone())


def _is_pinned(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    return not isinstance(args[0], CudaTensor) and is_pinned(args[0])


def _to_copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    source, target = args[0], kwargs.get("device")
    from_device = isinstance(source, CudaTensor)
    to_cuda = from_device if target is None else is_cuda(target)
    is_asynchronous = bool(kwargs.get("non_blocking"))
    if from_device != to_cuda and (target is None or torch.device(target).type != "meta"):
        _note_copy(str(func), source, to_cuda, is_asynchronous)
    if is_cuda(target):
        kwargs = kwargs | {"device": CPU}
    wants_pinned = bool(kwargs.get("pin_memory"))
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    out = func(to_host(source), **kwargs)
    if not to_cuda:
        # Into pinned memory where nothing is to wait (native/TensorConversions.cpp).
        return pin(out) if wants_pinned or (from_device and is_asynchronous) else out
    _look_at(str(func), out)
    return CudaTensor(out)


def _copy_(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    target, source, *rest = args
    is_asynchronous = bool(kwargs.get("non_blocking", rest[0] if rest else False))
    on_cuda = isinstance(target, CudaTensor)
    if on_cuda != isinstance(source, CudaTensor):
        is_asynchronous = is_asynchronous and (on_cuda or is_pinned(target))
        _note_copy(str(func), source, on_cuda, is_asynchronous)
    func(to_host(target), to_host(source))
    if on_cuda:
        _look_at(str(func), to_host(target))
    return target


def _note_copy(name: str, source: torch.Tensor, to_cuda: bool, is_asynchronous: bool) -> None:
    if source.numel() == 0:
        return
    if not to_cuda:
        if not is_asynchronous:
            RECORDER.note("wait", f"{name} to the host")
    elif not is_pinned(source):
        RECORDER.note("unpinned", f"{name} to the device")
    elif not is_asynchronous:
        RECORDER.note("wait", f"{name} to the device")


# --- what a CPU has no kernel for, or computes in more operations ---


def _native_dropout(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute dropout with the device's random numbers."""
    hidden, p, is_training = args
    if not isinstance(hidden, CudaTensor):
        return func(*args, **kwargs)
    RECORDER.launch(str(func))
    mask = torch.ones(hidden.shape, dtype=torch.bool)
    if is_training:
        mask.bernoulli_(1 - p, generator=GENERATOR)
    scale = 1 / (1 - p) if is_training and p < 1 else 1.0
    return CudaTensor(hidden.host * mask * scale), CudaTensor(mask)


def _factory(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    """Create a tensor, whose memory can be pinned."""
    if kwargs.get("pin_memory") and not is_cuda(kwargs.get("device")):
        return pin(func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"}))
    del HANDLERS[func]
    try:
        return dispatch(func, args, {name: value for name, value in kwargs.items() if name != "pin_memory"})
    finally:
        HANDLERS[func] = _factory


HANDLERS: dict[Any, Callable[[Any, tuple, dict[str, Any]], Any]] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._pin_memory.default: _pin_memory,
    aten.is_pinned.default: _is_pinned,
    aten.native_dropout.default: _native_dropout,
    aten.empty.memory_format: _factory,
    aten.empty_like.default: _factory,
    aten.zeros.default: _factory,
}


# --- what Python asks a tensor itself ---


class Functions(TorchFunctionMode):
    """Handles functions that never become an operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call: Any = REPLACED.get(func, func)
        generator = (kwargs or {}).get("generator")
        if not isinstance(generator, Generator) or not generator.is_on_device:
            return call(*args, **(kwargs or {}))
        # An operation would see a generator of the CPU, since that is what torch makes of it on the way.
        _given.append(generator)
        try:
            return call(*args, **((kwargs or {}) | {"generator": None}))
        finally:
            _given.pop()


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Run `tensor.data = value`, for which torch copies properties in C++."""
    if not isinstance(value, CudaTensor):
        if not isinstance(tensor, CudaTensor):
            return SET_DATA(tensor, value)
        RECORDER.note("mixed", "Tensor.data = ...")
        raise RuntimeError("a tensor on cuda:0 is given the data of a tensor on the CPU")
    if isinstance(tensor, CudaTensor):
        SET_DATA(tensor, value)
        tensor.host = value.host
        return None
    # A tensor of the host becomes one of the device, as `Module.cuda` has it; Python keeps the object.
    attributes = dict(tensor.__dict__)
    moved: Any = value.detach().requires_grad_(tensor.requires_grad)
    moved._is_param = isinstance(tensor, torch.nn.Parameter)
    torch.utils.swap_tensors(tensor, moved)
    vars(tensor).update(attributes)
    return None


def _data_ptr(tensor: torch.Tensor) -> int:
    return DATA_PTR(tensor.host if isinstance(tensor, CudaTensor) else tensor)


def _untyped_storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return STORAGE(tensor.host if isinstance(tensor, CudaTensor) else tensor)


def _tolist(tensor: torch.Tensor) -> Any:
    return TO_LIST(tensor.cpu() if isinstance(tensor, CudaTensor) else tensor)


def _tensor(data: Any, **options: Any) -> torch.Tensor:
    """Create a tensor from data. If the data is a list of tensors, the number of each is read."""
    if isinstance(data, (list, tuple)):
        data = tree_map_only(CudaTensor, torch.Tensor.item, data)
    return TENSOR(data, **options)


TENSOR, TO_LIST, STORAGE = torch.tensor, torch.Tensor.tolist, torch.Tensor.untyped_storage
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
DATA_PTR = torch.Tensor.data_ptr
REPLACED: dict[Any, Callable[..., Any]] = {
    SET_DATA: _set_data,
    DATA_PTR: _data_ptr,
    TO_LIST: _tolist,
    TENSOR: _tensor,
    STORAGE: _untyped_storage,
    torch.Tensor.record_stream: lambda tensor, stream: None,
}
