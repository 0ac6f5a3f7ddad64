"""CUPTI's callbacks, by which the saving process learns every module's binary and handle as it is loaded.

Subscribed before the first module is loaded, since earlier loads are not repeated, and released after saving. A
process has one subscriber, so a profiler at work here (or a second FER) is named and nothing is saved.
"""

from __future__ import annotations

import ctypes
import glob
import logging
import os
import sys
import threading
from ctypes import CFUNCTYPE, Structure, byref, c_int, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final

from fer.cudagraph import images
from fer.errors import DriverError

_log = logging.getLogger("fer.cudagraph")

_DRIVER_API: Final = 1
_RESOURCE: Final = 3
_MODULE_LOADED: Final = 6
_ENTER: Final = 0
_LOADS: Final = {
    "cuModuleLoadData": 19,
    "cuModuleLoadDataEx": 20,
    "cuModuleLoadFatBinary": 21,
    "cuLibraryLoadData": 678,
}
"""Driver calls that take an image by address, with CUPTI's number of each."""

_FILES: Final = {"cuModuleLoad": 18, "cuLibraryLoadFromFile": 679}
_BUSY: Final = 39
"""CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED."""


class _Resource(Structure):
    _fields_: ClassVar = [("context", c_void_p), ("handle", c_void_p), ("descriptor", c_void_p)]


class _Module(Structure):
    _fields_: ClassVar = [("number", c_uint32), ("size", c_size_t), ("cubin", c_void_p)]


_CALLBACK = CFUNCTYPE(None, c_void_p, c_int, c_uint32, c_void_p)


@dataclass
class Seen:
    """What was loaded so far.

    Attributes:
        by_handle: the image each module or library handle was loaded from; a handle used again has its last image.
        cubins: every cubin the driver loaded, in order.
        threads: which thread loaded each of them.
        windows: indices of the cubins that the load call of a handle loaded, in its own thread: others load meanwhile.
    """

    by_handle: dict[int, images.Loaded] = field(default_factory=dict)
    cubins: list[bytes] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    windows: dict[int, tuple[int, ...]] = field(default_factory=dict)


class Recorder:
    """A subscription. Use :meth:`close`, or CUPTI stays taken for the life of the process.

    Raises:
        DriverError: there is no CUPTI, or another subscriber (a profiler) holds it.
    """

    def __init__(self, library: Any = None) -> None:
        self.seen = Seen()
        self.troubles: list[str] = []
        self._lock = threading.Lock()
        self._open: dict[int, list[list[int]]] = {}  # by thread, what was loaded in each call that it is in
        self._enabled: list[tuple[int, int]] = []
        self._names = {number: name for name, number in (_LOADS | _FILES).items()}
        self._library = _open() if library is None else library
        self._callback = _CALLBACK(self._called)
        self._subscriber = c_void_p()
        code = self._library.cuptiSubscribe(byref(self._subscriber), self._callback, None)
        if code:
            why = "another profiler (or another recording) holds it in this process" if code == _BUSY else ""
            raise DriverError(
                f"CUPTI cannot be subscribed to ({code})",
                why=why,
                fix="End the profiler to have graphs saved; this start captures them without saving.",
                call="cuptiSubscribe",
                code=code,
            )
        try:
            self._enable(_RESOURCE, _MODULE_LOADED)
            for number in self._names:
                self._enable(_DRIVER_API, number)
        except DriverError:
            self.close()
            raise

    def close(self) -> None:
        """Give CUPTI back. Safe to call twice."""
        if self._subscriber:
            for domain, number in self._enabled:
                self._library.cuptiEnableCallback(0, self._subscriber, domain, number)
            self._library.cuptiUnsubscribe(self._subscriber)
            self._subscriber = c_void_p()
            _closed.append(self._callback)  # a call under way in another thread may still arrive

    def _enable(self, domain: int, number: int) -> None:
        code = self._library.cuptiEnableCallback(1, self._subscriber, domain, number)
        if code:
            raise DriverError(f"CUPTI cannot report call {number} ({code})", call="cuptiEnableCallback", code=code)
        self._enabled.append((domain, number))

    def _called(self, _: Any, domain: int, number: int, data: int) -> None:
        # Called by the driver in the middle of a load: an exception could go nowhere.
        try:
            if domain == _RESOURCE:
                self._module(data)
            else:
                self._load(number, data)
        except Exception as error:
            self.troubles.append(repr(error))

    def _module(self, data: int) -> None:
        resource = _Resource.from_address(data)
        if resource.descriptor:
            module = _Module.from_address(resource.descriptor)
            cubin, thread = ctypes.string_at(module.cubin, module.size), threading.get_ident()
            with self._lock:
                for members in self._open.get(thread, ()):
                    members.append(len(self.seen.cubins))
                self.seen.cubins.append(cubin)
                self.seen.threads.append(thread)

    def _load(self, number: int, data: int) -> None:
        # CUpti_CallbackData: site (int), function name, parameters, return value, ...
        calls = self._open.setdefault(threading.get_ident(), [])
        if c_int.from_address(data).value == _ENTER:
            calls.append([])
            return
        members = calls.pop() if calls else []
        parameters = c_void_p.from_address(data + 16).value or 0
        result = c_void_p.from_address(data + 24).value
        if result and c_int.from_address(result).value:
            return  # the load failed: there is no handle
        out = c_void_p.from_address(parameters).value
        handle = c_void_p.from_address(out).value if out else None
        if not handle:
            return
        self.seen.windows[handle] = tuple(members)
        if self._names[number] in _LOADS:
            self.seen.by_handle[handle] = images.look(c_void_p.from_address(parameters + 8).value or 0)
        else:
            path = ctypes.string_at(c_void_p.from_address(parameters + 8).value or 0)
            content = ctypes.create_string_buffer(Path(os.fsdecode(path)).read_bytes())
            self.seen.by_handle[handle] = images.look(ctypes.addressof(content))


_closed: list[Any] = []


def _open() -> Any:
    places = [pattern for path in sys.path for pattern in sorted(glob.glob(f"{path}/nvidia/*/lib/libcupti.so*"))]
    places += sorted(glob.glob("/usr/local/cuda/extras/CUPTI/lib64/libcupti.so*"))
    for place in [*places, "libcupti.so.13", "libcupti.so.12", "libcupti.so"]:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            _log.debug("%s: %s", place, error)
    raise DriverError(
        "there is no CUPTI",
        why="libcupti.so was not found beside torch nor below /usr/local/cuda",
        fix="Install nvidia-cuda-cupti to have graphs saved; this start captures them without saving.",
        call="dlopen",
        code=-1,
    )
