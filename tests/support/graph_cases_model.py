"""Decode graphs whose batch sizes are cases: each step makes a graph that is hard to keep, or that must not be kept.

What a case puts out is known beforehand, so a graph is right or wrong by itself, and not only the same as another.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.graphs_model import norm
from fer.engines.graphs import DecodeGraphs, Replayable
from fer.memory import driver
from tests.support import graph_cases_kernels as kernels
from tests.support.graph_cases_kernels import COUNT, Module, launch

KEPT = (
    "product", "norms", "programmatic", "programmatic_by_hand", "scaled", "scaled_by_library", "table", "cluster",
    "tiles", "tuned",
)  # fmt: skip
"""Cases whose graphs are restored."""

REFUSED = {
    "foreign_table": "variable table was set to a pointer outside the arena",
    "event_record": "event record node",
    "event_wait": "event wait node",
    "allocation": "memory allocation node",
    "collective": "collective kernel cross_device_reduce_1stage",
}
"""Cases whose graphs stay where they were captured, and the reason that must be given."""

OTHERS = ("twice", "tuned_late")
"""Two loaded copies of one binary that differ in their variables; a kernel that is tuned when it is captured."""

NUMBERS = {name: number for number, name in enumerate((*KEPT, *REFUSED, *OTHERS), 1)}
NAMES = {number: name for name, number in NUMBERS.items()}

LINKS = 24
"""Kernels in a chain of programmatic launches."""

SCALE = 3.0
SLEEP = 4_000_000
"""Clock cycles (some milliseconds) for which a kernel keeps others waiting, where waiting is what is tested."""


class Cases(DecodeGraphs):
    """The cases of these names, as batch sizes.

    Args:
        scale: what the host sets the variable of the modules ``scale`` to.
        forgotten: a tensor that :meth:`tensors` does not name.
        device: where everything lies.
    """

    pool_bytes = 256 << 20

    def __init__(
        self, names: Iterable[str], *, scale: float = SCALE, forgotten: str = "", device: str = "cuda"
    ) -> None:
        self.batch_sizes = tuple(NUMBERS[name] for name in names)
        self.scale, self.forgotten, self.device = scale, forgotten, device
        self._modules: dict[str, Any] = {}

    # -- memory

    def prepare(self) -> None:
        """Make what lies outside of the ranges; call it before anything is placed."""
        self.outside = torch.arange(COUNT, device=self.device, dtype=torch.float32)
        self.recorded, self.given = torch.cuda.Event(external=True), torch.cuda.Event(external=True)
        self.given.record()  # an event that was never recorded holds nobody up, and torch leaves it out of a capture

    def allocate_kv(self) -> None:
        self.cache = torch.zeros(256, 256, device=self.device, dtype=torch.bfloat16)

    def allocate(self) -> None:
        self.x = torch.zeros(COUNT, device=self.device)
        self.shared = torch.zeros(COUNT, device=self.device)
        self.looked_up = torch.arange(COUNT, device=self.device, dtype=torch.float32) * 4
        self.matrix = torch.zeros(256, 256, device=self.device, dtype=torch.bfloat16)
        self.weight = torch.ones(256, device=self.device, dtype=torch.bfloat16)

    def tensors(self) -> Mapping[str, torch.Tensor]:
        named = {
            "kv.0": self.cache,
            "x": self.x,
            "shared": self.shared,
            "looked_up": self.looked_up,
            "matrix": self.matrix,
            "weight": self.weight,
        }
        return {name: tensor for name, tensor in named.items() if name != self.forgotten}

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {}

    def layout(self) -> Mapping[str, Any]:
        return {"shape": [256, 256]}

    def kv_bytes(self) -> int:
        return 4 << 20

    def largest_kv_bytes(self) -> int:
        return 256 * 256 * 2

    def fill(self, size: int, number: int) -> None:
        values = torch.arange(COUNT, device=self.device) % (241 + number)
        self.x.copy_(values)
        self.shared.copy_(values + 7)
        grid = torch.arange(256 * 256, device=self.device).reshape(256, 256)
        self.matrix.copy_((grid % (61 + 2 * number)) / 32 - 1)

    def use(self, size: int, graph: Replayable | None, outputs: Mapping[str, torch.Tensor] | None) -> None:
        """Nothing decodes from these graphs."""

    # -- steps

    def step(self, size: int) -> Mapping[str, torch.Tensor]:
        return {"out": getattr(self, NAMES[size])()}

    def right(self, size: int, out: torch.Tensor) -> bool:
        """Whether a step on the inputs as they are now may put this out, to the bit."""
        x, name = self.x, NAMES[size]
        offsets = torch.arange(COUNT, device=self.device) % 4 + 1.0
        wanted = {
            "programmatic": lambda: x + LINKS,
            "programmatic_by_hand": lambda: x + LINKS,
            "scaled": lambda: x * SCALE + offsets,
            "scaled_by_library": lambda: x * SCALE + offsets,
            "twice": lambda: (x * SCALE + offsets) * 7 + offsets,
            "table": lambda: x + self.looked_up,
            "foreign_table": lambda: x + self.outside,
            "cluster": lambda: torch.roll(x, -256) + 16,
            "tiles": lambda: self.matrix * 2,
            "tuned": lambda: x * 3,
            "tuned_late": lambda: x[: COUNT // 2] * 3,
            "event_record": lambda: x + 1,
            "event_wait": lambda: self.shared * 2,
            "allocation": lambda: x,
            "collective": lambda: x * 2,
        }
        return name not in wanted or torch.equal(out, wanted[name]())

    def product(self) -> torch.Tensor:
        return torch.softmax(torch.relu(self.matrix @ self.matrix) @ self.matrix.t(), -1)

    def norms(self) -> torch.Tensor:
        out = norm(norm(self.matrix, self.weight), self.weight)
        self.cache.copy_(out)
        return out

    def programmatic(self) -> torch.Tensor:
        value = self.x
        for _ in range(LINKS):
            value, before = torch.empty_like(value), value
            kernels.chained[(COUNT // 256,)](before, value, 256, launch_pdl=True)
        return value

    def programmatic_by_hand(self) -> torch.Tensor:
        value = self.x
        for _ in range(LINKS):
            value, before = torch.empty_like(value), value
            self._run("plain", "chained_by_hand", before, value, programmatic=True)
        return value

    def scaled(self) -> torch.Tensor:
        return self._scaled("scale", self.x)

    def scaled_by_library(self) -> torch.Tensor:
        return self._scaled("scale of a library", self.x)

    def twice(self) -> torch.Tensor:
        return self._scaled("scale again", self._scaled("scale", self.x))

    def _scaled(self, copy: str, x: torch.Tensor) -> torch.Tensor:
        return self._run(copy, "scaled", x, torch.empty_like(x))

    def table(self) -> torch.Tensor:
        return self._run("table", "looked_up", self.x, torch.empty_like(self.x))

    def foreign_table(self) -> torch.Tensor:
        return self._run("foreign", "looked_up_elsewhere", self.x, torch.empty_like(self.x))

    def cluster(self) -> torch.Tensor:
        return self._run("plain", "ring", self.x, torch.empty_like(self.x), cluster=16)

    def collective(self) -> torch.Tensor:
        return self._run("plain", "cross_device_reduce_1stage", self.x, torch.empty_like(self.x))

    def tiles(self) -> torch.Tensor:
        out, block = torch.empty_like(self.matrix), [32, 64]
        source, target = (TensorDescriptor.from_tensor(each, block) for each in (self.matrix, out))
        kernels.tiles[(256 // 32, 256 // 64)](source, target, *block)
        return out

    def tuned(self) -> torch.Tensor:
        return self._tuned(COUNT)

    def tuned_late(self) -> torch.Tensor:
        # Not in the warm-ups, as in an engine that forgot to: the first call is the captured one.
        if not torch.cuda.is_current_stream_capturing():
            return torch.empty_like(self.x)
        return self._tuned(COUNT // 2)

    def event_record(self) -> torch.Tensor:
        torch.cuda._sleep(SLEEP)
        self.shared.copy_(self.x)
        self.recorded.record()
        return self.x + 1

    def event_wait(self) -> torch.Tensor:
        torch.cuda.current_stream().wait_event(self.given)
        return self.shared * 2

    def allocation(self) -> torch.Tensor:
        out, stream = torch.empty_like(self.x), torch.cuda.current_stream().cuda_stream
        between = driver.call("cuMemAllocAsync", self.x.nbytes, stream)
        copied = self._function("plain", "copied")
        launch(copied, self.x.data_ptr(), int(between))
        launch(copied, int(between), out.data_ptr())
        driver.call("cuMemFreeAsync", between, stream)
        return out

    def _tuned(self, count: int) -> torch.Tensor:
        out = torch.empty(count, device=self.device)
        kernels.tuned[lambda meta: (count // meta["BLOCK"],)](self.x, out, count)
        return out

    # -- modules

    def _run(self, copy: str, name: str, x: torch.Tensor, out: torch.Tensor, **how: Any) -> torch.Tensor:
        launch(self._function(copy, name), x.data_ptr(), out.data_ptr(), **how)
        return out

    def _function(self, copy: str, name: str) -> Any:
        """A function of a copy of a unit, which is loaded and set up as an engine would do it, at first use."""
        key = f"{copy}/{name}"
        if key not in self._modules:
            if copy not in self._modules:
                self._modules[copy] = self._load(copy)
            function = self._modules[key] = self._modules[copy].function(name)
            if name == "ring":
                kernels.allow_wide_clusters(function)
        return self._modules[key]

    def _load(self, copy: str) -> Module:
        unit = copy.split()[0]
        module = Module(unit, library=copy.endswith("library"))
        if unit == "scale":
            module.write("scale", ctypes.c_float(7.0 if copy.endswith("again") else self.scale))
            module.write("offsets", (ctypes.c_float * 4)(1, 2, 3, 4))
        elif unit in ("table", "foreign"):
            tensor = self.looked_up if unit == "table" else self.outside
            module.write("table", ctypes.c_uint64(tensor.data_ptr()))
        return module
