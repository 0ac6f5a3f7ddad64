"""Kernels of the graph cases: some from Triton, some from NVRTC, loaded and launched through the driver's own calls."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

COUNT = 4096
"""Elements of every vector; a block of 256 threads takes 256 of them."""

UNITS = {
    # Variables that the host sets after the module is loaded: a second copy of the module begins with zeros.
    "scale": """
__device__ float scale;
__constant__ float offsets[4];
extern "C" __global__ void scaled(const float* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i] * scale + offsets[i & 3];
}
""",
    "table": """
__device__ const float* table;
extern "C" __global__ void looked_up(const float* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i] + table[i];
}
""",
    # The same, another binary: where one holds a pointer that cannot be kept, the other is none the worse for it.
    "foreign": """
__device__ const float* table;
extern "C" __global__ void looked_up_elsewhere(const float* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i] + table[i];
}
""",
    "plain": """
extern "C" __global__ void copied(const float* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i];
}
// Named like the kernel by which engines add up over ranks; it adds nothing of anybody else's.
extern "C" __global__ void cross_device_reduce_1stage(const float* x, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i] + x[i];
}
extern "C" __global__ void chained_by_hand(const float* x, float* out) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float value = x[i];
    asm volatile("griddepcontrol.launch_dependents;");
    out[i] = value + 1.0f;
}
// Each block gives its values to the one before it in the cluster, through shared memory.
extern "C" __global__ void ring(const float* x, float* out) {
    __shared__ float mine[256];
    unsigned rank, blocks, here, there;
    float value;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    mine[threadIdx.x] = x[i];
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(here) : "l"(&mine[threadIdx.x]));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"((rank + 1) % blocks));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    out[i] = value + (float)blocks;
}
""",
}


@triton.jit
def chained(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_wait()
    value = tl.load(x + place)
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + place, value + 1.0)


@triton.jit
def tiles(source, target, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    target.store([row, column], source.load([row, column]) * 2)


@triton.jit
def doubled(x, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(x + place) * 2)


@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 512}, num_warps=8)], key=["count"])
@triton.jit
def tuned(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out + place, tl.load(x + place, mask=inside) * 3, mask=inside)


def compiled(unit: str, architecture: str) -> bytes:
    """A cubin of one of :data:`UNITS`. Raises RuntimeError with the compiler's words."""
    from cuda.bindings import nvrtc

    def call(name: str, *arguments: Any) -> Any:
        status, *rest = getattr(nvrtc, name)(*arguments)
        if int(status):
            raise RuntimeError(f"{name}: {status}")
        return rest[0] if rest else None

    program = call("nvrtcCreateProgram", UNITS[unit].encode(), f"{unit}.cu".encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={architecture}".encode()])
    if int(status):
        log = b" " * call("nvrtcGetProgramLogSize", program)
        call("nvrtcGetProgramLog", program, log)
        raise RuntimeError(log.decode())
    cubin = b" " * call("nvrtcGetCUBINSize", program)
    call("nvrtcGetCUBIN", program, cubin)
    return cubin


@functools.cache
def _cubin(unit: str) -> bytes:
    major, minor = torch.cuda.get_device_capability()
    return compiled(unit, f"sm_{major}{minor}")


class Module:
    """One loaded copy of a unit: as a module, or as a library (kernels are then ``CUkernel`` handles)."""

    def __init__(self, unit: str, *, library: bool = False) -> None:
        from fer.memory import driver

        self._call, self.library = driver.call, library
        image = ctypes.create_string_buffer(_cubin(unit))
        place = ctypes.addressof(image)
        if library:
            self._handle = self._call("cuLibraryLoadData", place, [], [], 0, [], [], 0)
        else:
            self._handle = self._call("cuModuleLoadData", place)

    def function(self, name: str) -> Any:
        """What :func:`launch` takes."""
        if not self.library:
            return self._call("cuModuleGetFunction", self._handle, name.encode())
        from fer.memory.driver import bindings

        return bindings().CUfunction(int(self._call("cuLibraryGetKernel", self._handle, name.encode())))

    def write(self, name: str, value: Any) -> None:
        """Set a variable to the bytes of a ctypes value."""
        call = "cuLibraryGetGlobal" if self.library else "cuModuleGetGlobal"
        where, size = self._call(call, self._handle, name.encode())
        assert size == ctypes.sizeof(value), (name, size)
        self._call("cuMemcpyHtoD", where, ctypes.addressof(value), size)


def launch(function: Any, *addresses: int, cluster: int = 0, programmatic: bool = False) -> None:
    """Launch over :data:`COUNT` elements on torch's current stream."""
    from fer.memory.driver import bindings, call

    cuda = bindings()
    attributes = []
    if cluster:
        each = cuda.CUlaunchAttribute()
        each.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = each.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        attributes.append(each)
    if programmatic:
        each = cuda.CUlaunchAttribute()
        each.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        each.value.programmaticStreamSerializationAllowed = 1
        attributes.append(each)
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = COUNT // 256, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 256, 1, 1
    config.sharedMemBytes = 0
    config.hStream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    config.attrs, config.numAttrs = attributes, len(attributes)
    call("cuLaunchKernelEx", config, function, (tuple(addresses), (ctypes.c_void_p,) * len(addresses)), 0)


def allow_wide_clusters(function: Any) -> None:
    """Let a function run in clusters of more than eight blocks, which not every GPU has."""
    from fer.memory.driver import bindings, call

    attribute = bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    call("cuFuncSetAttribute", function, attribute, 1)


def edges_of(graph: int) -> list[tuple[int, int, int, int]]:
    """Every edge of a ``CUgraph`` as source, target (positions in the driver's list of nodes), type, and source port.

    Asks the driver by itself, so that it can be held against what FER recorded and built.
    """
    library = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t()
    assert library.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_uint64 * count.value)()
    assert library.cuGraphGetNodes(ctypes.c_void_p(graph), nodes, ctypes.byref(count)) == 0
    place = {handle: number for number, handle in enumerate(nodes[: count.value])}
    none = [None] * 3
    assert library.cuGraphGetEdges_v2(ctypes.c_void_p(graph), *none, ctypes.byref(count)) == 0
    size = count.value
    if not size:
        return []  # asked for none of them, the driver complains
    source, target, data = (ctypes.c_uint64 * size)(), (ctypes.c_uint64 * size)(), (ctypes.c_ubyte * (8 * size))()
    assert library.cuGraphGetEdges_v2(ctypes.c_void_p(graph), source, target, data, ctypes.byref(count)) == 0
    found = []
    for number in range(size):
        from_port, _, kind = data[8 * number : 8 * number + 3]
        found.append((place[source[number]], place[target[number]], kind, from_port))
    return sorted(found)


def along(edges: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Type and port of the edges of a chain, from its first node to its last; nothing of the order of nodes is left."""
    after = {source: (target, kind, port) for source, target, kind, port in edges}
    (node,) = set(after) - {target for target, _, _ in after.values()}
    found = []
    while node in after:
        node, kind, port = after[node]
        found.append((kind, port))
    assert len(found) == len(edges), "not a chain"
    return found
