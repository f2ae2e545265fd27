"""Values as bytes and a table beside them, for programs that bring a pickler.

Calls have asyncrpc's own encoding.  A call under `_use_rpc_pickler` sends what that
pickler makes of the function and its arguments, and `_run_pickled` runs it: so what a
subclass of `_InternalRPCPickler` does to a class takes effect.

The table has tensors, and references, which only a call can send.

Source: torch.distributed.rpc.internal, for the names and what subclasses may use.
"""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc.functions import async_execution
from asyncrpc.compat.rpc.rref import RRef
from asyncrpc.core.calls.modes import Mode, mode_of

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

# The tables of the value that this thread packs, or unpacks.
_thread_local_tensor_tables = threading.local()
_pickler = pickle.Pickler
_unpickler = pickle.Unpickler  # noqa: S301  (of what a worker of the group sends)

_NO_CODE = (
    "{}. Default RPC pickler does not serialize function code: make sure that the "
    "callee can import the function under the same name"
)


class RPCExecMode(enum.Enum):
    """How a call is made, as shown in the name of its profiler range."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and its arguments, as a program's pickler gets them."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """What a function raised, as a value."""

    msg: str
    exception_type: type[BaseException]


@contextmanager
def _table(side: str, table: list[Any]) -> Iterator[None]:
    """Make a table the current one; a reducer may pack a value inside a value."""
    outer = getattr(_thread_local_tensor_tables, side, None)
    setattr(_thread_local_tensor_tables, side, table)
    try:
        yield
    finally:
        if outer is None:
            delattr(_thread_local_tensor_tables, side)
        else:
            setattr(_thread_local_tensor_tables, side, outer)


class _InternalRPCPickler:
    """Packs a value as a pickle, and a table of the tensors and references in it.

    Subclasses add to `_dispatch_table`, or register reducers.
    """

    def __init__(self) -> None:
        self._dispatch_table: dict[type, Callable[[Any], Any]] = {
            **copyreg.dispatch_table,
            torch.Tensor: self._tensor_reducer,
        }
        self._class_reducer_dict: dict[type, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        self._class_reducer_dict.setdefault(obj_class, reducer)

    @classmethod
    def _tensor_receiver(cls, tensor_index: int) -> Any:
        return _thread_local_tensor_tables.recv_tables[tensor_index]

    def _tensor_reducer(self, tensor: Any) -> tuple[Any, ...]:
        table = _thread_local_tensor_tables.send_tables
        table.append(tensor)
        return _InternalRPCPickler._tensor_receiver, (len(table) - 1,)

    @classmethod
    def _py_rref_receiver(cls, rref_fork_data: int) -> Any:
        return cls._tensor_receiver(rref_fork_data)

    def _py_rref_reducer(self, py_rref: RRef[Any]) -> tuple[Any, ...]:
        py_rref._check_sendable()  # noqa: SLF001
        _, index = self._tensor_reducer(py_rref)
        return _InternalRPCPickler._py_rref_receiver, index

    def _rref_reducer(self, rref: RRef[Any]) -> tuple[Any, ...]:
        return self._py_rref_reducer(rref)

    @classmethod
    def _script_module_receiver(cls, script_module_serialized: bytes) -> Any:
        archive = io.BytesIO(script_module_serialized)
        return torch.jit.load(archive)  # type: ignore[no-untyped-call]

    def _script_module_reducer(self, script_module: Any) -> tuple[Any, ...]:
        archive = io.BytesIO()
        torch.jit.save(script_module, archive)
        return _InternalRPCPickler._script_module_receiver, (archive.getvalue(),)

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        """Return a value as bytes, and the tensors and references beside them."""
        pickled = io.BytesIO()
        pickler = _pickler(pickled)
        scripted = {type(obj): self._script_module_reducer}
        pickler.dispatch_table = {
            **self._dispatch_table,
            RRef: self._rref_reducer,
            **(scripted if isinstance(obj, torch.jit.ScriptModule) else {}),
            **self._class_reducer_dict,
        }
        tensors: list[Any] = []
        with _table("send_tables", tensors):
            pickler.dump(obj)
        return pickled.getvalue(), tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[Any]) -> Any:
        """Return the value that `serialize` was given.

        A name that cannot be found is returned as an AttributeError.
        """
        with _table("recv_tables", tensor_table):
            try:
                return _unpickler(io.BytesIO(binary_data)).load()
            except AttributeError as error:
                missing = AttributeError(_NO_CODE.format(error))
                missing.__cause__ = error
                return missing


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[Any]]:
    """Return a value as bytes, and the tensors and references beside them."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[Any]) -> Any:
    """Return the value that `serialize` was given."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


# --- calls of what a program's pickler has packed ------------------------------------


def pickled_call(
    pickler: Any, function: Any, args: Any, kwargs: Any
) -> tuple[Callable[..., Any], tuple[bytes, list[Any]]]:
    """Return what to call in place of a function, with the packed call as arguments."""
    data, table = pickler.serialize(PythonUDF(function, args, kwargs))
    is_async = mode_of(function) is Mode.ASYNC_EXECUTION
    return (_run_pickled_async if is_async else _run_pickled), (data, table)


def _run_pickled(data: bytes, table: list[Any]) -> Any:
    return _unpacked(data, table)


@async_execution
def _run_pickled_async(data: bytes, table: list[Any]) -> Any:
    return _unpacked(data, table)


def _unpacked(data: bytes, table: list[Any]) -> Any:
    return _called(deserialize(data, table))


def _called(call: PythonUDF | AttributeError) -> Any:
    """Run a packed call."""
    if isinstance(call, AttributeError):
        raise call
    return call.func(*call.args, **call.kwargs)


def _run_function(python_udf: Any) -> Any:
    """Run a packed function; return what it raises as a `RemoteException`."""
    try:
        return _called(python_udf)
    except Exception as error:  # noqa: BLE001  (it is the answer)
        agents.print_raised(error)
        where = agents.current().get_worker_info()
        text = f"On {where}:\n{error!r}\n{traceback.format_exc()}"
        return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raise what `_run_function` has returned, if that is an exception."""
    if not isinstance(result, RemoteException):
        return
    text = result.msg.encode().decode("unicode_escape")
    try:
        error = result.exception_type(text)
    except BaseException as problem:
        raise RuntimeError(
            f"Failed to create original exception type. Error msg was {problem} "
            f"Original exception on remote side was {text}"
        ) from problem
    raise error


def _build_rpc_profiling_key(
    exec_type: RPCExecMode,
    func_name: str,
    current_worker_name: str,
    dst_worker_name: str,
) -> str:
    """Return the name of a call's range."""
    workers = f"({current_worker_name} -> {dst_worker_name})"
    return f"rpc_{exec_type.value}#{func_name}{workers}"


def _start_record_function(
    exec_type: RPCExecMode,
    func_name: str,
    current_worker_name: str,
    dest_worker_name: str,
) -> Any:
    """Begin the range of a call, which the program must end."""
    autograd: Any = torch.autograd
    if not autograd._profiler_enabled():  # noqa: SLF001
        raise AssertionError("Autograd profiler should be enabled.")
    name = _build_rpc_profiling_key(
        exec_type, func_name, current_worker_name, dest_worker_name
    )
    record = autograd._RecordFunction()  # noqa: SLF001
    autograd._run_before_callbacks(record, name)  # noqa: SLF001
    return record
