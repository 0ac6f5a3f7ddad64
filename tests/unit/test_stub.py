"""The allocator's machine code, called the way torch calls it."""

from __future__ import annotations

import ctypes
import platform
import threading

import pytest

from fer.errors import MappingError
from fer.memory.stub import ROUND, BumpAllocator, code_for

here = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="there is no code for this processor")

BASE = 0x3A7B_0000_0000


@here
def test_addresses_follow_each_other_in_whole_units() -> None:
    made = BumpAllocator(BASE, BASE + 8 * ROUND)
    assert [made.take(size) for size in (1, ROUND, ROUND + 1)] == [BASE, BASE + ROUND, BASE + 2 * ROUND]
    assert made.cursor == BASE + 4 * ROUND


@here
def test_what_does_not_fit_is_refused_and_takes_nothing() -> None:
    made = BumpAllocator(BASE, BASE + 2 * ROUND)
    assert made.take(3 * ROUND) == 0
    assert made.take(2 * ROUND) == BASE
    assert made.take(1) == 0
    made.limit = BASE + 3 * ROUND
    assert made.take(1) == BASE + 2 * ROUND


@here
def test_freeing_does_nothing() -> None:
    made = BumpAllocator(BASE, BASE + 4 * ROUND)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(made.free)
    free(made.take(1), ROUND, 0, None)
    assert made.take(1) == BASE + ROUND


@here
def test_threads_never_get_the_same_address() -> None:
    count, each = 8, 2000
    made = BumpAllocator(BASE, BASE + count * each * ROUND)
    got: list[list[int]] = [[] for _ in range(count)]

    def work(mine: list[int]) -> None:
        mine.extend(made.take(100) for _ in range(each))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    addresses = [address for mine in got for address in mine]
    assert sorted(addresses) == [BASE + number * ROUND for number in range(count * each)]


# --- for processors that nobody has here: the same bytes in an emulator ---

CODE, STATE, STACK, BACK = 0x10000, 0x20000, 0x40000, 0x1F000


class Emulated:
    """The two functions on a pretended processor, over a cursor and a limit."""

    def __init__(self, machine: str, start: int, limit: int) -> None:
        unicorn = pytest.importorskip("unicorn")
        code, self.free_at = code_for(machine, STATE)
        self._arm = machine == "aarch64"
        kind = (unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM) if self._arm else (unicorn.UC_ARCH_X86, unicorn.UC_MODE_64)
        self._cpu = unicorn.Uc(*kind)
        self._cpu.mem_map(CODE, 0x30000)
        self._cpu.mem_write(CODE, code)
        self._cpu.mem_write(STATE, start.to_bytes(8, "little") + limit.to_bytes(8, "little"))

    def call(self, at: int, *arguments: int) -> int:
        """Call a function as C does, until it returns."""
        from unicorn import arm64_const, x86_const

        cpu = self._cpu
        if self._arm:
            names = ("X0", "X1", "X2", "X3")
            registers = [getattr(arm64_const, f"UC_ARM64_REG_{name}") for name in names]
            cpu.reg_write(arm64_const.UC_ARM64_REG_LR, BACK)
            result = registers[0]
        else:
            names = ("RDI", "RSI", "RDX", "RCX")
            registers = [getattr(x86_const, f"UC_X86_REG_{name}") for name in names]
            cpu.reg_write(x86_const.UC_X86_REG_RSP, STACK - 16)
            cpu.mem_write(STACK - 16, BACK.to_bytes(8, "little"))
            result = x86_const.UC_X86_REG_RAX
        for register, argument in zip(registers, arguments, strict=False):
            cpu.reg_write(register, argument)
        cpu.emu_start(CODE + at, BACK, count=100)
        return int(cpu.reg_read(result))

    @property
    def state(self) -> tuple[int, int]:
        data = bytes(self._cpu.mem_read(STATE, 16))
        return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_code_of_each_processor_does_the_same(machine: str) -> None:
    cpu = Emulated(machine, BASE, BASE + 4 * ROUND)
    assert [cpu.call(0, size, 3, 7) for size in (1, ROUND, ROUND + 1)] == [BASE, BASE + ROUND, BASE + 2 * ROUND]
    assert cpu.state == (BASE + 4 * ROUND, BASE + 4 * ROUND)
    assert cpu.call(0, 1, 0, 0) == 0, "there is no room"
    cpu.call(cpu.free_at, BASE, ROUND, 0, 0)
    assert cpu.state == (BASE + 4 * ROUND, BASE + 4 * ROUND), "freeing does nothing, and a refusal takes nothing"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_does_not_fit_is_refused_on_each_processor(machine: str) -> None:
    cpu = Emulated(machine, BASE, BASE + 2 * ROUND)
    assert [cpu.call(0, size, 0, 0) for size in (3 * ROUND, 2 * ROUND, 1)] == [0, BASE, 0]
    assert Emulated(machine, BASE, BASE).call(0, 1, 0, 0) == 0


def test_another_processor_is_named() -> None:
    with pytest.raises(MappingError, match="riscv64"):
        code_for("riscv64", STATE)
