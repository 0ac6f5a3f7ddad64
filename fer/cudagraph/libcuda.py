"""The driver's graph, library and module calls through ctypes, for tables of nodes that would be slow one object each.

:class:`Cuda` takes any library that has these functions; tests give it one made of callbacks, so that the structures
and the marshalling below are the ones that run.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Final

import numpy as np

from fer.errors import DriverError
from fer.memory import driver

KERNEL_PARAMS: Final = np.dtype(
    [
        ("func", "<u8"),
        ("grid", "<u4", 3),
        ("block", "<u4", 3),
        ("shared", "<u4"),
        ("pad", "<u4"),
        ("pointers", "<u8"),  # kernelParams
        ("extra", "<u8"),
        ("kern", "<u8"),
        ("context", "<u8"),
    ]
)
"""``CUDA_KERNEL_NODE_PARAMS_v2``."""

MEMSET_PARAMS: Final = np.dtype(
    [("dst", "<u8"), ("pitch", "<u8"), ("value", "<u4"), ("element", "<u4"), ("width", "<u8"), ("height", "<u8")]
)
MEMCPY_PARAMS: Final = np.dtype(
    {
        "names": ["src_type", "src", "src_array", "dst_type", "dst", "dst_array", "width", "height", "depth"],
        "formats": ["<u4", "<u8", "<u8", "<u4", "<u8", "<u8", "<u8", "<u8", "<u8"],
        "offsets": [32, 48, 56, 120, 136, 144, 176, 184, 192],
        "itemsize": 200,
    }
)
"""``CUDA_MEMCPY3D``, the fields that are looked at; the rest of the 200 bytes travels along."""

BUFFER_POINTER: Final = 1
BUFFER_SIZE: Final = 2
"""Tags in a kernel's ``extra``; libraries write the two pairs in either order."""

MEMORYTYPE_DEVICE: Final = 2
MEMORYTYPE_UNIFIED: Final = 4
INSTANTIATE_FLAGS: Final = 1 | 8
"""AUTO_FREE_ON_LAUNCH and USE_NODE_PRIORITY, as torch instantiates; without the second, priorities are ignored."""

_P, _I, _U, _Z, _Q = c_void_p, c_int, c_uint, c_size_t, c_uint64
PROTOTYPES: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "graph_create": ("cuGraphCreate", (_P, _U)),
    "graph_destroy": ("cuGraphDestroy", (_P,)),
    "graph_nodes": ("cuGraphGetNodes", (_P, _P, _P)),
    "graph_edges": ("cuGraphGetEdges_v2", (_P, _P, _P, _P, _P)),
    "node_type": ("cuGraphNodeGetType", (_P, _P)),
    "kernel_params": ("cuGraphKernelNodeGetParams_v2", (_P, _P)),
    "kernel_attribute": ("cuGraphKernelNodeGetAttribute", (_P, _U, _P)),
    "set_kernel_attribute": ("cuGraphKernelNodeSetAttribute", (_P, _U, _P)),
    "memset_params": ("cuGraphMemsetNodeGetParams", (_P, _P)),
    "memcpy_params": ("cuGraphMemcpyNodeGetParams", (_P, _P)),
    "child_graph": ("cuGraphChildGraphNodeGetGraph", (_P, _P)),
    "add_kernel": ("cuGraphAddKernelNode_v2", (_P, _P, _P, _Z, _P)),
    "add_memset": ("cuGraphAddMemsetNode", (_P, _P, _P, _Z, _P, _P)),
    "add_memcpy": ("cuGraphAddMemcpyNode", (_P, _P, _P, _Z, _P, _P)),
    "add_empty": ("cuGraphAddEmptyNode", (_P, _P, _P, _Z)),
    "add_child": ("cuGraphAddChildGraphNode", (_P, _P, _P, _Z, _P)),
    "add_dependencies": ("cuGraphAddDependencies_v2", (_P, _P, _P, _P, _Z)),
    "instantiate": ("cuGraphInstantiateWithFlags", (_P, _P, _Q)),
    "upload": ("cuGraphUpload", (_P, _P)),
    "launch": ("cuGraphLaunch", (_P, _P)),
    "exec_destroy": ("cuGraphExecDestroy", (_P,)),
    "function_name": ("cuFuncGetName", (_P, _P)),
    "function_module": ("cuFuncGetModule", (_P, _P)),
    "function_parameter": ("cuFuncGetParamInfo", (_P, _Z, _P, _P)),
    "function_attribute": ("cuFuncGetAttribute", (_P, _I, _P)),
    "set_function_attribute": ("cuFuncSetAttribute", (_P, _I, _I)),
    "function_load": ("cuFuncLoad", (_P,)),
    "kernel_function": ("cuKernelGetFunction", (_P, _P)),
    "kernel_library": ("cuKernelGetLibrary", (_P, _P)),
    "library_load": ("cuLibraryLoadData", (_P, _P, _P, _P, _U, _P, _P, _U)),
    "library_unload": ("cuLibraryUnload", (_P,)),
    "library_kernel": ("cuLibraryGetKernel", (_P, _P, _P)),
    "library_module": ("cuLibraryGetModule", (_P, _P)),
    "library_global": ("cuLibraryGetGlobal", (_P, _P, _P, _P)),
    "module_global": ("cuModuleGetGlobal_v2", (_P, _P, _P, _P)),
    "pointer_attribute": ("cuPointerGetAttribute", (_P, _I, _Q)),
    "to_host": ("cuMemcpyDtoH_v2", (_P, _Q, _Z)),
    "to_device": ("cuMemcpyHtoD_v2", (_Q, _P, _Z)),
    "device_copy": ("cuMemcpyDtoD_v2", (_Q, _Q, _Z)),
    "fill": ("cuMemsetD8_v2", (_Q, ctypes.c_ubyte, _Z)),
    "synchronize": ("cuCtxSynchronize", ()),
    "stream_create": ("cuStreamCreate", (_P, _U)),
    "stream_destroy": ("cuStreamDestroy_v2", (_P,)),
    "stream_synchronize": ("cuStreamSynchronize", (_P,)),
    "push_context": ("cuCtxPushCurrent_v2", (_P,)),
    "pop_context": ("cuCtxPopCurrent_v2", (_P,)),
    "current_context": ("cuCtxGetCurrent", (_P,)),
}
"""Our name of each call, the driver's symbol, and its arguments. All of them exist in drivers from CUDA 12.5 on."""


SHORT: Final = frozenset(
    {"add_kernel", "node_type", "kernel_params", "kernel_attribute", "set_kernel_attribute", "function_attribute"}
)
"""Calls of about a microsecond, made ten thousand times in a row."""


class Cuda:
    """The calls as attributes: each returns the driver's status code, which :meth:`check` turns into an error.

    Args:
        quick: the same library for the calls of :data:`SHORT`, opened so that they keep Python's lock.

    Raises:
        DriverError: the driver lacks one of the functions.
    """

    def __init__(self, library: Any, quick: Any = None) -> None:
        for name, (symbol, arguments) in PROTOTYPES.items():
            function = getattr(quick if quick is not None and name in SHORT else library, symbol, None)
            if function is None:
                raise DriverError(f"this driver has no {symbol}", fix="Update the NVIDIA driver.", call=symbol, code=-1)
            if not isinstance(function, type(_PROBE)):  # a callback of a test knows its types already
                function.argtypes, function.restype = arguments, c_int
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def check(self, name: str, code: int) -> None:
        """Raises:
        DriverError: the code is not success; fields ``call`` and ``code``.
        """
        if code:
            symbol = PROTOTYPES[name][0]
            why = driver.EXPLANATIONS.get(code, "")
            raise DriverError(f"{symbol} failed with {code}", why=why, call=symbol, code=code)

    def call(self, name: str, *arguments: Any) -> None:
        """Make a call by our name of it. Raises DriverError."""
        self.check(name, getattr(self, name)(*arguments))

    def value(self, name: str, *arguments: Any, kind: Any = c_uint64, first: bool = False) -> int:
        """Make a call whose result comes back through its last argument (its first, with ``first``)."""
        out = kind()
        place = ctypes.byref(out)
        self.call(name, *((place, *arguments) if first else (*arguments, place)))
        return int(out.value or 0)


_PROBE = ctypes.CFUNCTYPE(c_int)()


@functools.cache
def open_cuda(*, restoring: bool = False) -> Cuda:
    """The driver of this machine.

    Args:
        restoring: keep Python's lock during short calls. Giving it up and getting it back for each of ten thousand
            calls lets a busy thread of the engine in between every two. Never in a process that records: CUPTI's
            callback needs the lock while the driver holds its own.

    Raises:
        DriverError: there is none.
    """
    try:
        return Cuda(ctypes.CDLL("libcuda.so.1"), ctypes.PyDLL("libcuda.so.1") if restoring else None)
    except OSError as error:
        raise DriverError(
            "the CUDA driver cannot be loaded", why=str(error), fix="Install a NVIDIA driver.", call="dlopen", code=-1
        ) from error


def address(array: np.ndarray[Any, Any]) -> int:
    """Where an array's bytes lie."""
    return int(array.__array_interface__["data"][0])  # a quarter of the time that array.ctypes.data takes
