"""A graph in a session of TensorFlow's C library, called by ctypes.

The library is part of the installed wheel. Python's TensorFlow is not imported: it takes six times the CPU
time of loading the library.
"""

import ctypes
import importlib.util
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from csdctl.worker.data.arrays import Array
from csdctl.worker.engine.protobuf import encode_field
from csdctl.worker.process.errors import WorkerError
from csdctl.worker.protocol.run_spec import CPU, GPU, Runtime

LOAD = "load"
"""The name of the function that fills a graph's lookup tables, once."""
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])
"""The bits of bfloat16, which numpy does not have; of an array, shape (…)."""
POINTER = ctypes.c_void_p
TYPES = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int16": 5,
    "int8": 6,
    "complex64": 8,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "uint16": 17,
    "complex128": 18,
    "float16": 19,
    "uint32": 22,
    "uint64": 23,
}
NUMPY_TYPES = {number: BFLOAT16 if name == "bfloat16" else np.dtype(name) for name, number in TYPES.items()}
STRING = 7
VIEW = 3
"""The type of a TF_TString that refers to bytes of others: in the lower two bits of its size."""
LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
OUT_OF_MEMORY = 8
"""TF_Code of memory that cannot be allocated."""
OUT_OF_RANGE = 11
"""TF_Code of what has no more elements."""
IN_CALLER = encode_field(3, -1)
"""`inter_op_thread_pool: -1` of RunOptions."""
CPU_DEVICES = b"\x0a\x07\x0a\x03GPU\x10\x00"
"""`device_count {key: "GPU" value: 0}` of a ConfigProto."""
FIRST_GPU = b"\x32\x05\x20\x01\x2a\x010"
"""`gpu_options {allow_growth: true visible_device_list: "0"}` of a ConfigProto."""
DEALLOCATE = ctypes.CFUNCTYPE(None, POINTER, ctypes.c_size_t, POINTER)


def are_finite(array: Array) -> bool:
    """Return whether all numbers of an array are finite, of bfloat16 too."""
    if array.dtype == BFLOAT16:
        array = (array["bfloat16"].astype(np.uint32) << 16).view(np.float32)
    return array.dtype.kind in "iub" or bool(np.isfinite(array.astype(np.float32, copy=False)).all())


@dataclass(frozen=True)
class FunctionInfo:
    """The names of a function's arguments and results in the graph."""

    feeds: tuple[str, ...]
    fetches: tuple[str, ...]
    targets: tuple[str, ...] = ()


class Output(ctypes.Structure):
    """TF_Output: an output of an operation."""

    _fields_ = (("operation", POINTER), ("index", ctypes.c_int))


class TensorFlowError(Exception):
    """TensorFlow's own error, whose message may have values of samples. `code` is its TF_Code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Library:
    """The functions of TensorFlow's C API, and arrays that its tensors refer to."""

    def __init__(self) -> None:
        """Load the library. Raises WorkerError if TensorFlow is not installed."""
        package = importlib.util.find_spec("tensorflow")  # imports nothing
        directories = (package.submodule_search_locations or ()) if package else ()
        paths = [Path(directory, name) for directory in directories for name in LIBRARIES]
        files = [path for path in paths if path.exists()]
        if len(files) != len(LIBRARIES):
            remedy = "install tensorflow-cpu: `csdctl provision`"
            raise WorkerError("TensorFlow's libraries are not installed", remedy=remedy)
        self._libraries = list(map(open_lazily, files))
        size = ctypes.c_size_t
        self._new_status = self.declare("TF_NewStatus", POINTER)
        self._delete_status = self.declare("TF_DeleteStatus", None, POINTER)
        self._code = self.declare("TF_GetCode", ctypes.c_int, POINTER)
        self._message = self.declare("TF_Message", ctypes.c_char_p, POINTER)
        self.delete_tensor = self.declare("TF_DeleteTensor", None, POINTER)
        self.tensor_data = self.declare("TF_TensorData", POINTER, POINTER)
        self.tensor_size = self.declare("TF_TensorByteSize", size, POINTER)
        self.tensor_type = self.declare("TF_TensorType", ctypes.c_int, POINTER)
        self.string_data = self.declare("TF_StringGetDataPointer", POINTER, POINTER)
        self.string_size = self.declare("TF_StringGetSize", size, POINTER)
        self.num_dims = self.declare("TF_NumDims", ctypes.c_int, POINTER)
        self.dim = self.declare("TF_Dim", ctypes.c_int64, POINTER, ctypes.c_int)
        self._new_tensor = self.declare(
            "TF_NewTensor",
            POINTER,
            *(ctypes.c_int, POINTER, ctypes.c_int, POINTER, size, DEALLOCATE, POINTER),
        )
        self._kept: dict[int, object] = {}
        self._numbers = itertools.count(1)
        self._deallocate = DEALLOCATE(self._release)

    def _release(self, data: int, length: int, number: int) -> None:
        del self._kept[number]

    def declare(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """Return a function of the library with the types of its result and its arguments."""
        library = next(file for file in reversed(self._libraries) if hasattr(file, name))
        function: Callable[..., Any] = getattr(library, name)
        function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
        return function

    def declare_checked(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """Return a function whose last argument is the status. It raises TensorFlowError."""
        function = self.declare(name, result, *arguments, POINTER)

        def call(*values: Any) -> Any:
            status = self._new_status()
            try:
                returned = function(*values, status)
                if code := self._code(status):
                    raise TensorFlowError(self._message(status).decode(errors="replace"), code)
                return returned
            finally:
                self._delete_status(status)

        return call

    def new_buffer(self, content: bytes) -> Any:
        """Return a TF_Buffer with a copy of `content`."""
        create = self.declare("TF_NewBufferFromString", POINTER, ctypes.c_char_p, ctypes.c_size_t)
        return create(content, len(content))

    def delete(self, name: str, pointer: Any) -> None:
        """Call a function that deletes an object."""
        self.declare(name, None, POINTER)(pointer)

    def tensor(self, value: Array | bytes) -> int:
        """Return a tensor of an array or a scalar of bytes. Memory aligned to 64 bytes is used as it is."""
        number, shape = next(self._numbers), getattr(value, "shape", ())
        if isinstance(value, bytes):
            place = ctypes.cast(ctypes.c_char_p(value), POINTER).value
            array, kind = np.array([len(value) << 2 | VIEW, place, 0], np.uint64), STRING
        else:
            native = value.astype(value.dtype.newbyteorder("="), copy=False)
            array = np.ascontiguousarray(native)  # of a scalar, it is one-dimensional
            kind = TYPES["bfloat16" if array.dtype == BFLOAT16 else array.dtype.name]
        self._kept[number] = array, value
        dims = (ctypes.c_int64 * len(shape))(*shape)
        memory = array.ctypes.data, array.nbytes
        pointer: int = self._new_tensor(kind, dims, len(shape), *memory, self._deallocate, number)
        return pointer


def open_lazily(file: Path) -> ctypes.CDLL:
    """Return a shared library whose functions are found as they are called. Ctypes would find all at once."""
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    handle = dlopen(bytes(file), os.RTLD_LAZY | os.RTLD_GLOBAL)
    # Where that fails, ctypes says why.
    return ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL, handle=handle)


@cache
def load_library(onednn: bool = True) -> Library:
    """Return the library, loaded once. `onednn`: whether it uses oneDNN's kernels."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # it has 10 bits of precision
    if not onednn:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
    return Library()


class Tensors:
    """Tensors that TensorFlow has allocated. They are deleted with this object and its arrays."""

    def __init__(self, library: Library, pointers: Any) -> None:
        """`pointers`: a ctypes array of TF_Tensor*."""
        self._library, self.pointers = library, pointers

    def __len__(self) -> int:
        return len(self.pointers)

    def __del__(self) -> None:
        delete = self._library.delete_tensor
        for pointer in self.pointers:
            if pointer:
                delete(pointer)

    def tail(self, start: int) -> "Tensors":
        """Move the tensors from `start` on to another object, and return it."""
        moved = (POINTER * (len(self) - start))(*self.pointers[start:])
        self.pointers[start:] = [None] * len(moved)
        return Tensors(self._library, moved)

    def array(self, place: int) -> Array:
        """Return a tensor as an array that shares its memory. It must not be written to."""
        library, pointer = self._library, self.pointers[place]
        shape = [library.dim(pointer, axis) for axis in range(library.num_dims(pointer))]
        dtype, num_bytes = NUMPY_TYPES[library.tensor_type(pointer)], library.tensor_size(pointer)
        if not num_bytes:
            return np.zeros(shape, dtype)
        memory = (ctypes.c_char * num_bytes).from_address(library.tensor_data(pointer))
        memory.owner = self
        array = np.frombuffer(memory, dtype).reshape(shape)
        array.flags.writeable = False
        return array

    def string(self, place: int) -> bytes:
        """Return a copy of a scalar of bytes."""
        data = self._library.tensor_data(self.pointers[place])
        return ctypes.string_at(self._library.string_data(data), self._library.string_size(data))

    def arrays(self) -> list[Array]:
        """Return all tensors as arrays."""
        return list(map(self.array, range(len(self))))


def encode_config(runtime: Runtime) -> bytes:
    """Return a serialized ConfigProto: the threads of `runtime`, and no optimization of the graph."""
    optimizer = encode_field(3, encode_field(3, -1))  # opt_level: L0
    rewrite = encode_field(10, encode_field(19, 1))  # disable_meta_optimizer
    threads = encode_field(2, runtime.threads) + encode_field(5, runtime.inter_threads)
    devices = CPU_DEVICES if runtime.device == CPU else FIRST_GPU
    return devices + threads + encode_field(10, optimizer + rewrite)


class GraphSession:
    """A graph that is run with the threads of a `Runtime`, or in those that call it. thread-safe."""

    def __init__(self, content: bytes, runtime: Runtime, *, in_caller: bool = False) -> None:
        """`content`: a serialized GraphDef. Raises TensorFlowError for one that cannot be run."""
        self.library = library = load_library(runtime.onednn)
        declare, declare_checked = library.declare, library.declare_checked
        self._graph = declare("TF_NewGraph", POINTER)()
        buffer, options = library.new_buffer(content), declare("TF_NewImportGraphDefOptions", POINTER)()
        try:
            declare_checked("TF_GraphImportGraphDef", None, *[POINTER] * 3)(self._graph, buffer, options)
        finally:
            library.delete("TF_DeleteImportGraphDefOptions", options)
            library.delete("TF_DeleteBuffer", buffer)
        options, config = declare("TF_NewSessionOptions", POINTER)(), encode_config(runtime)
        try:
            configure = declare_checked("TF_SetConfig", None, POINTER, ctypes.c_char_p, ctypes.c_size_t)
            configure(options, config, len(config))
            self.pointer = declare_checked("TF_NewSession", POINTER, *[POINTER] * 2)(self._graph, options)
        finally:
            library.delete("TF_DeleteSessionOptions", options)
        if runtime.device == GPU and b"GPU" not in self._list_devices():
            raise WorkerError(
                "TensorFlow sees no GPU; the fleet file has `device: gpu`",
                "check the driver there (`nvidia-smi` lists the GPU), install tensorflow[and-cuda] in place "
                "of tensorflow-cpu; or set `device: auto`",
            )
        self.options = library.new_buffer(IN_CALLER) if in_caller else None
        self.run = declare_checked(
            "TF_SessionRun",
            None,
            POINTER,
            *(POINTER, POINTER, POINTER, ctypes.c_int),
            *(POINTER, POINTER, ctypes.c_int),
            *(POINTER, ctypes.c_int),
            POINTER,
        )
        self._find_operation = declare("TF_GraphOperationByName", POINTER, POINTER, ctypes.c_char_p)

    def find(self, name: str, info: FunctionInfo) -> "Function":
        """Return a function of the graph. Raises WorkerError if the graph does not have it."""
        targets = (POINTER * len(info.targets))(*map(self._operation, info.targets))
        return Function(self, self._outputs(info.feeds), self._outputs(info.fetches), targets)

    def find_all(self, functions: Mapping[str, FunctionInfo]) -> dict[str, "Function"]:
        """Return functions of the graph, whose lookup tables are filled."""
        by_name = {name: self.find(name, info) for name, info in functions.items()}
        if LOAD in by_name:
            by_name[LOAD]()
        return by_name

    def tensors(self, arrays: Iterable[Array]) -> Tensors:
        """Return tensors with the values of arrays, which must not be written to afterwards."""
        pointers = [self.library.tensor(array) for array in arrays]
        return Tensors(self.library, (POINTER * len(pointers))(*pointers))

    def _list_devices(self) -> list[bytes]:
        library, size = self.library, ctypes.c_int
        devices = library.declare_checked("TF_SessionListDevices", POINTER, POINTER)(self.pointer)
        try:
            count = library.declare("TF_DeviceListCount", size, POINTER)(devices)
            type_of = library.declare_checked("TF_DeviceListType", ctypes.c_char_p, POINTER, size)
            return [type_of(devices, place) for place in range(count)]
        finally:
            library.delete("TF_DeleteDeviceList", devices)

    def _outputs(self, names: Sequence[str]) -> Any:
        parts = [name.partition(":") for name in names]
        outputs = [Output(self._operation(name), int(index or 0)) for name, _, index in parts]
        return (Output * len(outputs))(*outputs)

    def _operation(self, name: str) -> int:
        operation: int | None = self._find_operation(self._graph, name.encode())
        if operation is None:
            raise WorkerError(f"the compiled graph has no operation {name}", "run `csdctl prepare` again")
        return operation


class Function:
    """A part of a graph: a function of its feeds."""

    def __init__(self, session: GraphSession, feeds: Any, fetches: Any, targets: Any) -> None:
        self._session, self._feeds, self._fetches, self._targets = session, feeds, fetches, targets

    def __call__(self, *inputs: Tensors | Array | bytes) -> Tensors:
        """Return the fetches for the feeds, given in their order. An item may stand for several."""
        library = self._session.library
        pointers: list[Any] = []
        created: list[Any] = []
        for value in inputs:
            if isinstance(value, Tensors):
                pointers += value.pointers
            else:
                created.append(library.tensor(value))
                pointers.append(created[-1])
        outputs = (POINTER * len(self._fetches))()
        try:
            self._session.run(
                self._session.pointer,
                self._session.options,
                *(self._feeds, (POINTER * len(self._feeds))(*pointers), len(self._feeds)),
                *(self._fetches, outputs, len(self._fetches)),
                *(self._targets, len(self._targets)),
                None,
            )
        finally:
            for pointer in created:
                library.delete_tensor(pointer)
        return Tensors(library, outputs)
