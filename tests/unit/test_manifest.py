"""The manifest believes nothing it reads: whatever passes is consistent, whatever is not is an IntegrityError."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from fer.errors import IntegrityError
from fer.weights import manifest, module_state, records
from fer.weights.manifest import Manifest
from tests.support.state_modules import Grouped, Helper, Layer
from tests.support.state_roundtrip import on_meta, write_down


def build() -> nn.Module:
    module = Grouped()
    module.head = Layer()
    module.helper = Helper(names=["a"], table={"x": 1})
    return module


def sample() -> Manifest:
    loaded: Any = build()
    loaded.gate.load()
    loaded.head.load()
    loaded.helper.names.append(torch.ones(3))
    loaded.helper.table["y"] = (torch.ones(2).t(), 1.5, None, b"b", torch.bfloat16, {"k"})
    loaded.gate.weight.scale = torch.zeros(())
    loaded.wk = loaded.head.weight.detach()[1:, ::2]
    return write_down(module_state.capture(loaded, on_meta(build)), "f" * 64)


SAMPLE = sample()
ENCODED = manifest.encode(SAMPLE)


def test_comes_back_equal() -> None:
    assert manifest.decode(ENCODED) == SAMPLE
    assert manifest.decode(memoryview(ENCODED)) == SAMPLE
    assert manifest.encode(manifest.decode(ENCODED)) == ENCODED


def test_an_empty_module_has_a_manifest() -> None:
    empty = write_down(module_state.capture(nn.Module(), nn.Module()))
    assert manifest.decode(manifest.encode(empty)) == empty


def test_sizes_of_elements_are_torch_s() -> None:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    sizes = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in found}
    legacy = {name for name in sizes if name.startswith(("qint", "quint"))}
    assert {name: size for name, size in manifest.ITEMSIZE.items() if name in sizes} == {
        name: size for name, size in sizes.items() if name not in legacy
    }


def test_reading_a_manifest_loads_no_torch() -> None:
    code = "import sys; import fer.weights.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def storage(index: int, **changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda m: replace(m, storages=[replace(s, **changes) if n == index else s for n, s in enumerate(m.storages)])


def tensor(**changes: Any) -> Callable[[Manifest], Manifest]:
    def change(m: Manifest) -> Manifest:
        first, *rest = m.state.tensors
        return replace(m, state=replace(m.state, tensors=[replace(first, **changes), *rest]))

    return change


def node(pick: type, **changes: Any) -> Callable[[Manifest], Manifest]:
    def change(m: Manifest) -> Manifest:
        nodes = list(m.state.nodes)
        index = max(n for n, found in enumerate(nodes) if isinstance(found, pick))
        nodes[index] = replace(nodes[index], **changes)
        return replace(m, state=replace(m.state, nodes=nodes))

    return change


BAD: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "version": (lambda m: replace(m, version=2), "version is 2"),
    "huge version": (lambda m: replace(m, version=1 << 40), "version is None"),
    "slab out of range": (storage(0, slab=1), "slab 1, of 1"),
    "negative slab": (storage(0, slab=-1), "slab -1"),
    "misaligned": (storage(1, offset=520), "offset 520"),
    "negative offset": (storage(0, offset=-512), "offset -512"),
    "negative size": (storage(0, nbytes=-1), "-1 bytes"),
    "over the end of the slab": (storage(0, offset=1 << 40), "over the end of slab"),
    "overlap": (storage(1, offset=0), "overlap in slab 0"),
    "unknown device": (storage(0, device="xpu"), "'xpu'"),
    "other device than its tensors": (storage(0, device="cuda"), "its storage on 'cuda'"),
    "too small a storage": (storage(0, nbytes=8), "end of its storage"),
    "storage out of range": (tensor(storage=99), "storage 99"),
    "unknown dtype": (tensor(dtype="qint8"), "dtype 'qint8'"),
    "shape without strides": (tensor(stride=[1]), "strides"),
    "negative stride": (tensor(stride=[-1, 1]), "strides"),
    "negative size of a dimension": (tensor(shape=[-4, 6]), "shape"),
    "negative storage offset": (tensor(offset=-1), "offset -1"),
    "reaching too far": (tensor(offset=1), "end of its storage"),
    "strides that reach too far": (tensor(stride=[7, 1]), "end of its storage"),
    "huge strides": (tensor(stride=[1 << 62, 1 << 62]), "end of its storage"),
    "no name": (tensor(names=[]), "no name"),
    "device of no kind": (tensor(device="meta"), "meta"),
    "attribute out of range": (tensor(attrs={"x": records.LeafRef(99)}), "number 99"),
    "place out of range": (tensor(place=records.Place(99, []), kept=["x"]), "node 99"),
    "no nodes": (lambda m: replace(m, state=replace(m.state, nodes=[])), "begin with a module"),
    "module without place": (node(records.ModuleNode, place=None), "has no place"),
    "node hanging on itself": (node(records.MappingNode, place=records.Place(1 << 20, [])), "hangs on node"),
    "slot out of range": (node(records.ModuleNode, parameters={"w": records.LeafRef(-1)}), "number -1"),
    "wrapper out of range": (node(records.ModuleNode, buffers={"w": records.WrapperRef(0)}), "number 0, of 0"),
    "node out of range": (node(records.ModuleNode, attrs={"w": records.NodeRef(99)}), "number 99"),
    "deep inside": (
        node(records.SequenceNode, items=[records.Tuple("", [records.Partial([records.LeafRef(99)], {})])]), "number 99"
    ),
    "weak": (node(records.SequenceNode, items=[records.Weak(records.LeafRef(99))]), "number 99"),
    "key": (node(records.MappingNode, pairs=[(records.NodeRef(99), 1)]), "number 99"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_contradictions_are_named(name: str) -> None:
    change, why = BAD[name]
    with pytest.raises(IntegrityError) as error:
        manifest.decode(manifest.encode(change(SAMPLE)))
    assert why in str(error.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x95",
        b"\x95\x01",
        b"garbage",
        ENCODED[:-1],
        ENCODED + b"\x00",
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode({"version": 1}),
        msgspec.msgpack.encode([1, [], [], [], 5]),
        b"\x95\x01" + b"\x91" * 100_000,
    ],
    ids=range(10),
)
def test_what_is_no_manifest(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        manifest.decode(data)


def test_values_nested_without_end() -> None:
    deep: records.Value = 1
    for _ in range(300):
        deep = records.Tuple("", [deep])
    data = manifest.encode(node(records.SequenceNode, items=[deep])(SAMPLE))
    try:
        manifest.decode(data)
    except IntegrityError:
        pass  # too deep for one of the readers: refused, not crashed


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_bytes_are_refused_or_consistent(data: st.DataObject) -> None:
    damaged = bytearray(ENCODED)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                damaged[at] = data.draw(st.integers(0, 255))
            case 1:
                del damaged[at : at + data.draw(st.integers(1, 9))]
            case _:
                damaged[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        if not damaged:
            break
    try:
        found = manifest.decode(bytes(damaged))
    except IntegrityError:
        return
    # It passed: then a restore from it may fail, but only by saying that the skeleton does not fit.
    skeleton = on_meta(build)
    try:
        module_state.rehearse(skeleton, found.state)
    except IntegrityError:
        pass
