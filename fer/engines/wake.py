"""What libraries make when a GPU is used first: torch's runtime, BLAS handles and their workspaces."""

from __future__ import annotations

import torch


def libraries(device: torch.device, dtype: torch.dtype) -> None:
    """Have it made now, by a few small operations; nothing to do on the host."""
    if device.type == "cuda":
        with torch.cuda.device(device), torch.inference_mode():
            row = torch.ones(1, 64, dtype=dtype, device=device)
            torch.nn.functional.silu(row @ row.T).argmax().item()
