"""In the restoring process: binaries into the driver, their functions made as they were.

The driver reads binaries out of the mapped archive and keeps referring to them, so the archive stays mapped as long as
anything of it is in use.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_size_t, c_uint64
from typing import Any, Final, TypeVar

import numpy as np

from fer.cudagraph.archive import check_image
from fer.cudagraph.libcuda import Cuda, address
from fer.cudagraph.records import FIXED, MAX_DYNAMIC_SHARED, SETTABLE, UNREADABLE, Tables
from fer.cudagraph.walk import describe
from fer.errors import ArchiveError, FerError, GraphRefused

T = TypeVar("T")

_PRESERVED: Final = 1
"""CU_LIBRARY_BINARY_IS_PRESERVED: the image stays where it is, so the driver makes no copy."""


class Binaries:
    """Loads binaries when a graph first needs them.

    Attributes:
        handles: ``CUfunction`` of each function by index, 0 where it is not loaded; a list that is shared with the
            builder and grows.
        troubles: why a binary or function could not be used, by function index.
    """

    def __init__(self, cuda: Cuda, tables: Tables) -> None:
        self._cuda, self._tables = cuda, tables
        self.handles: list[int] = [0] * len(tables.functions)
        self.troubles: dict[int, FerError] = {}
        self._libraries: dict[int, int] = {}
        self._keep: list[Any] = []
        self._ahead: dict[int, Future[int]] = {}
        self._checked: dict[int, Future[None]] = {}

    def check_ahead(self, order: Iterable[str]) -> None:
        """Begin to check the binaries of these graphs in threads of their own, those of the first ones first.

        It needs no context. To load them needs none either, and waits for one that is being made.
        """
        self._begin(self._checked, order, lambda image: check_image(self._tables.images[image]))

    def load_ahead(self, order: Iterable[str]) -> None:
        """Begin to load them likewise, and to check what was not.

        Neither hashing nor the driver's loading needs Python's lock, and they are a third of a restore's work.
        """
        self._begin(self._ahead, order, self._load_image)

    def _begin(self, begun: dict[int, Future[T]], order: Iterable[str], work: Callable[[int], T]) -> None:
        tables, names = self._tables, {graph.name: graph for graph in self._tables.top()}
        functions = (index for name in order if name in names for index in tables.functions_of(names[name]))
        pool = ThreadPoolExecutor(2, thread_name_prefix="fer-binaries")
        for image in dict.fromkeys(tables.functions[index].image for index in functions):
            if image >= 0:
                begun[image] = pool.submit(work, image)
        pool.shutdown(wait=False)

    def need(self, functions: Iterable[int]) -> None:
        """Load these functions.

        Raises:
            GraphRefused: one of them cannot be had as it was.
        """
        for index in functions:
            if not self.handles[index] and index not in self.troubles:
                try:
                    self.handles[index] = self._load(index)
                except FerError as error:
                    self.troubles[index] = error
            if index in self.troubles:
                trouble = self.troubles[index]
                raise GraphRefused(f"kernel {self._tables.functions[index].name}", why=str(trouble)) from trouble

    def close(self) -> None:
        """Unload everything. No graph that uses any of it may exist any more."""
        for image, coming in self._ahead.items():
            if not coming.cancel() and coming.exception() is None:
                self._libraries.setdefault(image, coming.result())
        for library in self._libraries.values():
            self._cuda.library_unload(library)
        self._libraries.clear()
        self._ahead.clear()

    def _load(self, index: int) -> int:
        function = self._tables.functions[index]
        library = self._library(function.image)
        name = ctypes.create_string_buffer(function.name.encode())
        kernel = c_uint64()
        self._cuda.call("library_kernel", byref(kernel), library, ctypes.addressof(name))
        handle = self._cuda.value("kernel_function", kernel.value, first=True)
        self._prepare(index, handle)
        return handle

    def _prepare(self, index: int, handle: int) -> None:
        """Set what the saving process had set on the function, and see that it is the same function."""
        function = self._tables.functions[index]
        self._cuda.function_load(handle)
        now = describe(self._cuda, handle, function.image)
        differing = [i for i in FIXED if now.attributes[i] != function.attributes[i]]
        if now.layout != function.layout or differing:
            raise GraphRefused(
                f"{function.name} is not what it was", why=f"attributes {differing} or parameters differ"
            )
        for number in SETTABLE:
            wanted = function.attributes[number]
            if wanted == UNREADABLE or wanted == now.attributes[number]:
                continue
            if number == MAX_DYNAMIC_SHARED and wanted < now.attributes[number]:
                continue  # lowering it would break whoever raised it
            code = self._cuda.set_function_attribute(handle, number, wanted)
            if code and number == MAX_DYNAMIC_SHARED:
                self._cuda.check("set_function_attribute", code)

    def _library(self, image: int) -> int:
        if image < 0:
            raise GraphRefused("its binary is not in the archive")
        if image not in self._libraries:
            self._libraries[image] = self._open(image)
        return self._libraries[image]

    def _open(self, index: int) -> int:
        image = self._tables.images[index]
        library = self._ahead.pop(index).result() if index in self._ahead else self._load_image(index)
        try:
            for name, value in image.globals:
                self._restore(library, name, value)
        except BaseException:
            self._cuda.library_unload(library)
            raise
        return library

    def _load_image(self, index: int) -> int:
        """A binary's ``CUlibrary``, once its bytes are those that were saved. In any thread: it needs no context."""
        image = self._tables.images[index]
        if image.trouble:
            raise GraphRefused("its binary may not be used", why=image.trouble)
        checked = self._checked.get(index)
        if checked is None:
            check_image(image)
        else:
            checked.result()
        place = _address(image.data, self._keep)
        options = (ctypes.c_int * 1)(_PRESERVED)
        values = (ctypes.c_void_p * 1)(1)
        library = c_uint64()
        self._cuda.call("library_load", byref(library), place, None, None, 0, options, values, 1)
        return library.value

    def _restore(self, library: int, name: str, value: bytes) -> None:
        where, size = c_uint64(), c_size_t()
        text = ctypes.create_string_buffer(name.encode())
        self._cuda.call("library_global", byref(where), byref(size), library, ctypes.addressof(text))
        if size.value != len(value):
            raise ArchiveError(f"variable {name} has {size.value} bytes, {len(value)} were saved", section="names")
        source = ctypes.create_string_buffer(value, len(value))
        self._cuda.call("to_device", where.value, ctypes.addressof(source), len(value))


def _address(data: bytes | memoryview, keep: list[Any]) -> int:
    """Where an image's bytes lie; ``keep`` holds them there."""
    array = np.frombuffer(data, "<u1")
    keep.append(array)
    return address(array)
