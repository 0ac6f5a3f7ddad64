"""From handles to exact binaries: images in memory, CUPTI's callbacks, fatbins' members, module variables."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fer.cudagraph import archive as archives
from fer.cudagraph import images
from fer.cudagraph.audit import Owner, Owners
from fer.cudagraph.cupti import Recorder, Seen
from fer.cudagraph.record import Functions, changed_globals, oracle
from fer.cudagraph.records import Tables
from fer.errors import DriverError
from tests.support.cudagraph_driver import FakeDriver, cubin

RECORDED = Path(__file__).parent.parent / "data" / "h200.fergraph"


def test_a_real_cubin_is_read() -> None:
    data = bytes(archives.read(RECORDED).tables.images[0].data)
    assert images.elf_size(data[:64]) == len(data)
    assert images.kernels_in(data) == ["rms_norm"]
    # Triton's own text, which only the compiler looks up and no host can write.
    assert [(each.name, each.local) for each in images.globals_in(data)] == [("_$_str", True)]


def test_images_are_recognised_where_they_lie() -> None:
    data = cubin("a", "b")
    held = ctypes.create_string_buffer(data, len(data))
    found = images.look(ctypes.addressof(held))
    assert (found.kind, found.data) == ("elf", data)
    assert images.kernels_in(data) == ["a", "b"]
    fat = struct.pack("<IHHQ", images.FATBIN, 1, 16, 24) + bytes(24)
    held = ctypes.create_string_buffer(fat, len(fat))
    found = images.look(ctypes.addressof(held))
    assert (found.kind, found.size, found.data) == ("fatbin", 40, fat)
    wrapper = ctypes.create_string_buffer(struct.pack("<IIQQ", images.WRAPPER, 1, ctypes.addressof(held), 0))
    found = images.look(ctypes.addressof(wrapper))
    assert (found.kind, found.address, found.data) == ("fatbin", ctypes.addressof(held), b"")
    text = ctypes.create_string_buffer(b"//\n.version 8.7")
    assert images.look(ctypes.addressof(text)).kind == "text"


def test_variables_of_a_module() -> None:
    (found,) = images.globals_in(cubin("k", variables={"scale": b"\x01\x02\x03\x04"}))
    assert (found.name, found.initial, found.local) == ("scale", b"\x01\x02\x03\x04", False)


class FakeCupti:
    """The four calls, and a way to make the driver's loads happen."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.enabled, self.unsubscribed = code, [], 0
        self._callback: Callable[..., None] | None = None

    def cuptiSubscribe(self, subscriber: Any, callback: Any, data: Any) -> int:
        if not self.code:
            self._callback = callback
            subscriber._obj.value = 5
        return self.code

    def cuptiEnableCallback(self, on: int, subscriber: Any, domain: int, number: int) -> int:
        self.enabled.append((on, domain, number))
        return 0

    def cuptiUnsubscribe(self, subscriber: Any) -> int:
        self.unsubscribed += 1
        return 0

    def load(self, number: int, handle: int, image: int, *members: bytes, result: int = 0) -> None:
        """A driver call that loads an image, with the modules that appear during it."""
        assert self._callback is not None
        out = ctypes.c_uint64(handle)
        parameters = (ctypes.c_uint64 * 2)(ctypes.addressof(out), image)
        code = ctypes.c_int(result)
        for site in (0, 1):
            data = (ctypes.c_uint64 * 4)(site, 0, ctypes.addressof(parameters), ctypes.addressof(code))
            self._callback(None, 1, number, ctypes.addressof(data))
            for member in members if site == 0 else ():
                self.module(member)

    def module(self, member: bytes) -> None:
        assert self._callback is not None
        held = ctypes.create_string_buffer(member, len(member))
        module = (ctypes.c_uint64 * 3)(1, len(member), ctypes.addressof(held))
        resource = (ctypes.c_uint64 * 3)(0, 0, ctypes.addressof(module))
        self._callback(None, 3, 6, ctypes.addressof(resource))


def test_loads_are_seen_with_handle_image_and_members() -> None:
    library = FakeCupti()
    recorder = Recorder(library)
    data = cubin("k")
    held = ctypes.create_string_buffer(data, len(data))
    library.load(678, 0x77, ctypes.addressof(held), data)
    library.load(19, 0x88, ctypes.addressof(held), result=2)
    assert recorder.seen.by_handle[0x77].data == data
    assert recorder.seen.windows == {0x77: (0,)}
    assert recorder.seen.cubins == [data]
    assert not recorder.troubles
    recorder.close()
    recorder.close()
    assert library.unsubscribed == 1
    assert sorted(x[1:] for x in library.enabled if x[0]) == sorted(x[1:] for x in library.enabled if not x[0])


def test_what_another_thread_loads_meanwhile_belongs_to_its_own_call() -> None:
    library = FakeCupti()
    recorder = Recorder(library)
    mine, other = cubin("k", salt=b"mine"), cubin("k", salt=b"other")
    held = ctypes.create_string_buffer(mine, len(mine))

    class Meanwhile(bytes):
        """Looked at in the middle of this thread's load."""

        def __len__(self) -> int:
            if not done:
                done.append(1)
                thread = threading.Thread(target=library.load, args=(678, 0x99, ctypes.addressof(held), other))
                thread.start()
                thread.join()
            return super().__len__()

    done: list[int] = []
    library.load(678, 0x77, ctypes.addressof(held), Meanwhile(mine))
    cubins = recorder.seen.cubins
    assert sorted(cubins) == sorted([mine, other])
    found = {handle: [cubins[index] for index in window] for handle, window in recorder.seen.windows.items()}
    assert found == {0x77: [mine], 0x99: [other]}
    recorder.close()


def test_another_profiler_is_named() -> None:
    with pytest.raises(DriverError, match="another profiler"):
        Recorder(FakeCupti(39))


def described(fake: FakeDriver, seen: Seen, *functions: tuple[int, int]) -> Tables:
    tables = Tables()
    resolve = Functions(fake.cuda, tables, seen)
    for func, kern in functions:
        resolve(func, kern)
    return tables


def test_a_name_does_not_choose_between_two_binaries() -> None:
    fake, seen = FakeDriver(), Seen()
    plans = [cubin("plan", salt=b"one"), cubin("plan", salt=b"two")]
    for handle, data in zip((0x100, 0x200), plans, strict=True):
        seen.by_handle[handle] = images.Loaded("elf", 0, len(data), data)
        seen.cubins.append(data)
    functions = [(fake.function("plan", [(0, 8)], module=handle), 0) for handle in (0x200, 0x100)]
    tables = described(fake, seen, *functions)
    assert [bytes(tables.images[f.image].data) for f in tables.functions] == [plans[1], plans[0]]


def test_the_library_of_a_kernel_counts_before_its_module() -> None:
    fake, seen = FakeDriver(), Seen()
    data = cubin("k")
    seen.by_handle[0x100] = images.Loaded("elf", 0, len(data), data)
    function = fake.function("k", [], module=0x999, library=0x100)
    fake.kernels[0x50] = function
    tables = described(fake, seen, (0, 0x50), (function, 0x50))
    assert [f.image for f in tables.functions] == [0, 0]


def test_a_binary_that_was_not_seen_is_none() -> None:
    fake = FakeDriver()
    tables = described(fake, Seen(), (fake.function("k", [], module=0x999), 0))
    assert tables.functions[0].image == -1


def test_a_fatbins_member_must_be_certain() -> None:
    fake, seen = FakeDriver(), Seen()
    seen.cubins = [cubin("k"), cubin("other"), cubin("twice", salt=b"1"), cubin("twice", salt=b"2")]
    seen.by_handle[0x100] = images.Loaded("fatbin", 0, 0, b"")
    seen.windows[0x100] = (0, 1, 2, 3)
    handles = [(fake.function(name, [], module=0x100), 0) for name in ("k", "twice", "absent")]
    tables = described(fake, seen, *handles)
    assert [f.image for f in tables.functions] == [0, -1, -1]


def variables(value: bytes) -> tuple[FakeDriver, bytes]:
    fake = FakeDriver()
    fake.variables[(0x100, "scale")] = bytearray(value)
    fake.device_memory = [(0x7F00_0000_0000, 1 << 20), (0x3A7B_0000_0000, 1 << 20)]
    return fake, cubin("k", variables={"scale": bytes(8)})


def changed(value: bytes) -> tuple[tuple[tuple[str, bytes], ...], str]:
    fake, image = variables(value)
    owners = Owners([Owner("kv", 0x3A7B_0000_0000, 1 << 20)])
    return changed_globals(fake.cuda, 0x100, image, owners, oracle(fake.cuda))


def test_unchanged_variables_are_left_out() -> None:
    assert changed(bytes(8)) == ((), "")


def test_changed_variables_are_kept() -> None:
    value = struct.pack("<fI", 3.0, 0)
    assert changed(value) == ((("scale", value),), "")


def test_a_variable_that_points_into_the_arena_is_kept_and_one_that_points_elsewhere_refuses() -> None:
    assert changed(struct.pack("<Q", 0x3A7B_0000_0100))[1] == ""
    assert "scale was set to a pointer outside the arena" in changed(struct.pack("<Q", 0x7F00_0000_0010))[1]
