"""Tensor subclasses that can be published, each taken apart and put together by a written codec.

A codec follows torch's flatten protocol (``__tensor_flatten__``, ``__tensor_unflatten__``): inner tensors become
ordinary records, the context becomes plain data. What is not data is taken from the live process: a DTensor's mesh
comes from the skeleton's own DTensor in that slot. A subclass without a codec is refused by name; nothing is pickled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from fer.weights.records import Value
from fer.weights.values import class_name


class Codec(ABC):
    """How instances of one tensor subclass become records and come back.

    Attributes:
        name: stands in the manifest; a codec whose data changes gets a new one.
    """

    name: str

    @abstractmethod
    def flatten(self, tensor: torch.Tensor, path: str, home: int) -> tuple[dict[str, torch.Tensor], dict[str, Value]]:
        """Inner tensors by attribute name, and the rest as plain data.

        Args:
            tensor: an instance.
            path: of the tensor, for messages.
            home: index of the engine's own GPU.

        Raises:
            UnsupportedState: its context cannot be written as data.
        """

    @abstractmethod
    def unflatten(
        self, cls: type, inner: dict[str, torch.Tensor], meta: dict[str, Value], like: Any, home: int, **outer: Any
    ) -> torch.Tensor:
        """The tensor again.

        Args:
            cls: the class.
            inner: its inner tensors, bound to their memory.
            meta: what :meth:`flatten` wrote.
            like: the skeleton's tensor in that slot, or None.
            home: index of the engine's own GPU.
            outer: ``shape`` and ``stride`` of the whole.

        Raises:
            ValueError: the data does not fit this process.
        """

    @abstractmethod
    def own_attributes(self, tensor: torch.Tensor) -> frozenset[str]:
        """Names in the instance's ``__dict__`` that the codec takes care of."""


_CODECS: dict[str, Codec] = {}


def codec_for(cls: type) -> Codec | None:
    """The codec of a tensor class, or None."""
    return _CODECS.get(class_name(cls))
