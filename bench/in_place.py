"""Make an edition whose weights are created where they will stay.

Publishing moves a loaded model, so it needs the model and one slab; an edition that is one slab of 96 GiB on a card of
140 GiB cannot come about by moving. Here the model is built inside the slabs and then sealed and handed over by the
same code as any other.
"""

from __future__ import annotations

import torch
from torch import nn

from bench import synthetic
from fer.engines.module import ModuleEngine
from fer.memory import torch_private
from fer.options import Options
from fer.report import Report
from fer.weights import checkpoint, layout, module_state, publish
from fer.weights.client import KeeperClient
from fer.weights.edition import Workshop
from fer.weights.lookup import Lookup


def publish_in_place(engine: ModuleEngine, *, slabs: int) -> dict[str, float]:
    """Publish ``engine``'s model in ``slabs`` slabs; returns bytes and slabs made."""
    report = Report()
    with report.phase("weights"):
        workshop = Workshop(engine, Options.load(), report)
        client = KeeperClient.connect()
        lookup = Lookup(client, engine.identity(), workshop.backend)
        client.claim(lookup.key, wait_s=0)
        module = engine.build()
        pieces, total = _pieces(module, engine.device)
        granularity = {workshop.backend.device.split(":")[0]: workshop.backend.granularity}
        wanted = total // slabs + max(piece.nbytes for piece in pieces)
        plans = layout.plan(pieces, granularity, wanted=wanted)
        device_total = sum(plan.size for plan in plans)
        begun = client.begin(
            lookup.key, fields=lookup.fields, checkpoint=checkpoint.stamp([]).to_json(), total=device_total
        )
        moved = publish.Moved()
        address = workshop.backend.base + begun.offset if workshop.backend.base else 0
        for plan in plans:
            moved.slabs.append((workshop.backend.create(plan.size, address=address), workshop.backend))
            address += plan.size if address else 0
        _bind(module, plans, moved)
        synthetic.fill(module)
        prepared = publish.Prepared(
            capture=module_state.capture(module, engine.build()),
            structure=module_state.structure_digest(module),
            slabs=[],
            total=device_total,
            device_total=device_total,
        )
        prepared.slabs = _plans_of(prepared.capture, moved)
        record = workshop._seal(prepared, moved)
        workshop._hand_over(client, begun.transaction, record, moved)
    return {"bytes": device_total, "slabs": len(plans)}


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _pieces(module: nn.Module, device: str) -> tuple[list[layout.Piece], int]:
    kind = device.split(":")[0]
    sizes = [tensor.numel() * tensor.element_size() for tensor in _tensors(module)]
    pieces = [layout.Piece(storage=n, device=kind, address=n, nbytes=size) for n, size in enumerate(sizes)]
    return pieces, sum(-(-size // 512) * 512 for size in sizes)


def _bind(module: nn.Module, plans: list[layout.SlabPlan], moved: publish.Moved) -> None:
    names = [
        (m, kind, name) for kind in ("_parameters", "_buffers") for m in module.modules() for name in getattr(m, kind)
    ]
    order = {id(tensor): n for n, tensor in enumerate(_tensors(module))}
    where = {index: (n, offset) for n, plan in enumerate(plans) for index, offset in plan.placed}
    for owner, kind, name in names:
        old = getattr(owner, kind)[name]
        slab, offset = where[order[id(old)]]
        mapping, backend = moved.slabs[slab]
        storage = backend.storage(mapping, offset, old.numel() * old.element_size())
        new = torch_private.tensor_over(storage, old.dtype, tuple(old.shape), old.stride(), 0)
        getattr(owner, kind)[name] = nn.Parameter(new, requires_grad=False) if kind == "_parameters" else new


def _plans_of(capture: module_state.Capture, moved: publish.Moved) -> list[layout.SlabPlan]:
    plans = [layout.SlabPlan(device=b.device.split(":")[0], size=m.size) for m, b in moved.slabs]
    slabs = [mapping for mapping, _ in moved.slabs]
    for live in capture.storages:
        (n,) = (i for i, slab in enumerate(slabs) if 0 <= live.address - slab.address < slab.size)
        plans[n].placed.append((live.index, live.address - slabs[n].address))
    return plans
