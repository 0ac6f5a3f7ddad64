"""Which physical GPU a CUDA device number means."""

from __future__ import annotations

from pathlib import Path

import pytest

from fer.errors import DriverError, UsageError
from fer.memory import driver, gpus
from fer.memory.gpus import Gpu, Visible, arena_index, canonical_bus, number_by_bus, resolve, visible
from tests.support.memory_driver import FakeDriver


def _host(count: int = 4, **changes: dict[str, object]) -> list[Gpu]:
    made = []
    for n in range(count):
        facts: dict[str, object] = {"uuid": f"GPU-{n}a{n}b0000", "pci_bus": f"0000:{n + 10:02x}:00.0", "name": "H200"}
        made.append(Gpu(index=0, **(facts | changes.get(f"gpu{n}", {}))))  # type: ignore[arg-type]
    return number_by_bus(made[::-1])


A, B, C, D = (f"GPU-{n}a{n}b0000" for n in range(4))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, Visible(uuids=(A, B, C, D))),
        ("0,1,2,3", Visible(uuids=(A, B, C, D))),
        ("2,0", Visible(uuids=(C, A))),
        (" 3 , 1 ", Visible(uuids=(D, B))),
        (f"{D},{A}", Visible(uuids=(D, A))),
        ("GPU-2,GPU-0a", Visible(uuids=(C, A))),
        ("1,GPU-0", Visible(uuids=(B, A))),
        ("", Visible(uuids=())),
        ("-1", Visible(uuids=(), stopped_at="-1")),
        ("1,-1,2", Visible(uuids=(B,), stopped_at="-1")),
        ("0,4,1", Visible(uuids=(A,), stopped_at="4")),
        ("GPU-", Visible(uuids=(), stopped_at="GPU-")),
        ("GPU-9", Visible(uuids=(), stopped_at="GPU-9")),
        ("NoDevFiles", Visible(uuids=(), stopped_at="NoDevFiles")),
        ("1,2,1", Visible(uuids=(), stopped_at="1")),
    ],
)
def test_cuda_visible_devices(setting: str | None, expected: Visible) -> None:
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert visible(_host(), environ) == expected


def test_mixed_models_are_ranked_by_cuda_alone() -> None:
    host = _host(2, gpu0={"name": "T400"})
    assert not visible(host, {}).certain
    assert not visible(host, {"CUDA_VISIBLE_DEVICES": "1"}).certain
    assert visible(host, {"CUDA_VISIBLE_DEVICES": A}).certain
    assert visible(host, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).certain


def test_mig_instances_stand_in_for_their_gpu() -> None:
    host = _host(2, gpu0={"mig": True, "instances": ("MIG-11aa", "MIG-22bb")})
    assert visible(host, {}).uuids == ("MIG-11aa", "MIG-22bb", B)
    assert visible(host, {"CUDA_VISIBLE_DEVICES": "MIG-2"}).uuids == ("MIG-22bb",)
    assert visible(host, {"CUDA_VISIBLE_DEVICES": A}).stopped_at == A
    one = _host(1, gpu0={"mig": True, "instances": ("MIG-11aa",)})
    assert visible(one, {"CUDA_VISIBLE_DEVICES": f"MIG-{A}/1/0"}).uuids == ("MIG-11aa",)


def test_resolve_names_the_device_or_says_why_not() -> None:
    assert resolve(1, {"CUDA_VISIBLE_DEVICES": "3,2"}, _host()) == C
    with pytest.raises(UsageError, match="stops at '9'") as caught:
        resolve(1, {"CUDA_VISIBLE_DEVICES": "3,9,2"}, _host())
    assert "shows 1 of 4 GPUs" in str(caught.value)
    with pytest.raises(UsageError):
        resolve(-1, {}, _host())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:1B:00.0", "0000:1b:00.0"),
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("1b:00", "0000:1b:00.0"),
        ("00010001:C8:1F.7", "10001:c8:1f.7"),
    ],
)
def test_pci_addresses_in_every_spelling(text: str, expected: str) -> None:
    assert canonical_bus(text) == expected


@pytest.mark.parametrize("text", ["", "GPU-0", "0000:1b", "0000:1b:00.9", "zz:00.0"])
def test_what_is_no_pci_address(text: str) -> None:
    with pytest.raises(ValueError):
        canonical_bus(text)


def _bus(folder: Path, address: str, vendor: str, kind: str) -> None:
    device = folder / address
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def test_the_arena_follows_the_hosts_bus_whatever_a_container_sees(tmp_path: Path) -> None:
    _bus(tmp_path, "0000:5d:00.0", "0x10de", "0x030200")
    _bus(tmp_path, "0000:1b:00.0", "0x10de", "0x030200")
    _bus(tmp_path, "0000:05:00.0", "0x10de", "0x068000")  # an NVSwitch
    _bus(tmp_path, "0000:1b:00.1", "0x10de", "0x040300")  # a GPU's audio function
    _bus(tmp_path, "0000:02:00.0", "0x1a03", "0x030000")  # the board's own VGA
    (tmp_path / "0000:07:00.0").mkdir()  # unreadable
    assert arena_index("0000:1B:00.0", tmp_path) == 0
    assert arena_index("00000000:5D:00.0", tmp_path) == 1


def test_without_sysfs_the_drivers_own_list_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: fake)
    monkeypatch.setattr(gpus, "_nvml_buses", list)
    assert arena_index("0000:1b:00.0", tmp_path / "none") == 0
    assert fake.calls.count("cuDeviceGetPCIBusId") == 1
    assert arena_index("0000:ff:00.0", tmp_path / "none") == 0


def test_a_machine_without_nvidia_says_so() -> None:
    try:
        found = gpus.inventory()
    except DriverError as error:
        assert "NVML" in str(error) or "nvml" in str(error)
        return
    assert [gpu.index for gpu in found] == list(range(len(found)))
