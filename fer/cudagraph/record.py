"""In the saving process: from a kernel's handle to the exact binary it came from, and the state of its module.

A kernel's name does not identify its binary (cuDNN makes a cubin for each plan under one name). Its library's or
module's handle does: CUPTI showed which image each handle was loaded from. Where that image is a fatbin the driver
chose one member of it, so the same fatbin is loaded once more and CUPTI shows the member.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import threading
from ctypes import byref, c_size_t, c_uint64

from fer.cudagraph import images
from fer.cudagraph.audit import Oracle, Owners
from fer.cudagraph.cupti import Seen
from fer.cudagraph.libcuda import Cuda
from fer.cudagraph.records import Image, Tables
from fer.cudagraph.walk import describe
from fer.errors import DriverError

_log = logging.getLogger("fer.cudagraph")


class Functions:
    """Describes each function a walk meets, once, with its binary; pass it to :func:`fer.cudagraph.walk.walk`."""

    def __init__(self, cuda: Cuda, tables: Tables, seen: Seen) -> None:
        self._cuda, self._tables, self._seen = cuda, tables, seen
        self._known: dict[tuple[int, int], int] = {}
        self._images: dict[str, int] = {}
        self._members: dict[int, list[bytes]] = {}
        self._modules: dict[int, int] | None = None
        self._modules_of_image: dict[int, list[int]] = {}

    def __call__(self, func: int, kern: int) -> int:
        key = (func, kern)
        if key not in self._known:
            self._known[key] = self._describe(func, kern)
        return self._known[key]

    def read_globals(self, owners: Owners, oracle: Oracle) -> None:
        """Compare every used module's variables with its image; record what changed, or why it cannot be kept."""
        for index, modules in self._modules_of_image.items():
            image = self._tables.images[index]
            found = {changed_globals(self._cuda, module, image.data, owners, oracle) for module in modules}
            # One copy is loaded for all graphs later, so copies that differ cannot be kept apart.
            differ = ((), "its binary is loaded more than once, and the copies' variables differ")
            values, trouble = found.pop() if len(found) == 1 else differ
            self._tables.images[index] = Image(image.data, image.digest, values, trouble or image.trouble)

    def _describe(self, func: int, kern: int) -> int:
        if not func:
            func = self._cuda.value("kernel_function", kern, first=True)
        module, library = self._handles(func, kern)
        function = describe(self._cuda, func, -1)
        data = self._binary(function.name, library, module)
        if data is not None:
            place = self._image(data)
            if module and module not in self._modules_of_image.setdefault(place, []):
                self._modules_of_image[place].append(module)
            function = type(function)(function.name, place, function.layout, function.attributes)
        self._tables.functions.append(function)
        return len(self._tables.functions) - 1

    def _handles(self, func: int, kern: int) -> tuple[int, int]:
        """Module and library of a function, 0 where it has none."""
        module, library = c_uint64(), c_uint64()
        self._cuda.function_module(byref(module), func)
        if kern:
            self._cuda.kernel_library(byref(library), kern)
        return module.value, library.value

    def _binary(self, name: str, library: int, module: int) -> bytes | None:
        handle = next((h for h in (library, module) if h and h in self._seen.by_handle), 0)
        if not handle and module:
            handle = self._library_of(module)
        if not handle:
            return None
        loaded = self._seen.by_handle[handle]
        if loaded.kind == "elf":
            return loaded.data
        if loaded.kind != "fatbin":
            return None
        fitting = {cubin for cubin in self._members_of(handle, loaded) if name in images.kernels_in(cubin)}
        return fitting.pop() if len(fitting) == 1 else None

    def _library_of(self, module: int) -> int:
        """The library handle whose module in this context is ``module``; 0 for none."""
        if self._modules is None:
            self._modules = {}
            for handle in list(self._seen.by_handle):
                out = c_uint64()
                if self._cuda.library_module(byref(out), handle) == 0 and out.value:
                    self._modules[out.value] = handle
        return self._modules.get(module, 0)

    def _members_of(self, handle: int, loaded: images.Loaded) -> list[bytes]:
        """What the driver loads out of a fatbin, seen by loading it again while CUPTI looks on."""
        if handle in self._members:
            return self._members[handle]
        members = [self._seen.cubins[index] for index in self._seen.windows.get(handle, ())]
        if not members:
            copy = ctypes.create_string_buffer(loaded.data) if loaded.data else None
            place = ctypes.addressof(copy) if copy is not None else loaded.address
            begin = len(self._seen.cubins)
            library, module = c_uint64(), c_uint64()
            try:
                self._cuda.call("library_load", byref(library), place, None, None, 0, None, None, 0)
                self._cuda.call("library_module", byref(module), library.value)
                fresh = zip(self._seen.cubins[begin:], self._seen.threads[begin:], strict=True)
                members = [data for data, thread in fresh if thread == threading.get_ident()]
                self._cuda.library_unload(library.value)
            except DriverError as error:
                _log.warning("a library's binary could not be read again: %s", error)
        self._members[handle] = list(members)
        return self._members[handle]

    def _image(self, data: bytes) -> int:
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._images:
            self._images[digest] = len(self._tables.images)
            self._tables.images.append(Image(data, digest))
        return self._images[digest]


def changed_globals(
    cuda: Cuda, module: int, image: bytes | memoryview, owners: Owners, oracle: Oracle
) -> tuple[tuple[tuple[str, bytes], ...], str]:
    """Variables of a module that no longer hold what the image says, and why they cannot be restored.

    A variable the driver does not find by name cannot have been written by the host; one that kernels may have written
    (not constant, not initialised text) counts as a reason.
    """
    changed = []
    for each in images.globals_in(image):
        where, size = c_uint64(), c_size_t()
        if cuda.module_global(byref(where), byref(size), module, each.name.encode()):
            if each.section.startswith(".nv.global") and not each.section.startswith(".nv.global.init"):
                return (), f"its module's variable {each.name} cannot be read"
            continue
        now = ctypes.create_string_buffer(size.value)
        cuda.call("to_host", ctypes.addressof(now), where.value, size.value)
        if now.raw[: each.size] == each.initial:
            continue
        for at in range(0, len(now.raw) - 7, 8):
            word = int.from_bytes(now.raw[at : at + 8], "little")
            if oracle(word) and not owners.name_of(word):
                return (), f"its module's variable {each.name} was set to a pointer outside the arena"
        changed.append((each.name, now.raw))
    return tuple(changed), ""


def oracle(cuda: Cuda) -> Oracle:
    """What the driver says of addresses, remembered."""
    memory_type = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    known: dict[int, str] = {}
    out = ctypes.c_uint()

    def ask(address: int) -> str:
        if address < 1 << 20 or address >= 1 << 47:
            return ""
        if address not in known:
            code = cuda.pointer_attribute(byref(out), memory_type, address)
            known[address] = "" if code else {1: "host", 2: "device"}.get(out.value, "device")
        return known[address]

    return ask  # type: ignore[return-value]
