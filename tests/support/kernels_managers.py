"""Cache managers that users of Triton have: real ones, one with a form of its own, and broken ones.

Named by ``TRITON_CACHE_MANAGER=tests.support.kernels_managers:Shared``; folders come from :data:`FOLDER`.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, ClassVar

from triton.runtime.cache import CacheManager, FileCacheManager, RemoteCacheBackend, RemoteCacheManager

FOLDER = "TEST_MANAGER_FOLDER"


class Shared(FileCacheManager):
    """A second folder, as on a shared disk."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self.cache_dir = os.path.join(os.environ[FOLDER], key)
        os.makedirs(self.cache_dir, exist_ok=True)


class Linked(Shared):
    """Hands out links, as caches with one copy of each content do."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        group = super().get_group(filename)
        links = Path(os.environ[FOLDER], "links", self.key)
        links.mkdir(parents=True, exist_ok=True)
        for name, path in (group or {}).items():
            (links / name).unlink(missing_ok=True)
            (links / name).symlink_to(path)
        return group and {name: str(links / name) for name in group}


class Squeezed(FileCacheManager):
    """The same folder as FER's, with contents in a form that only this class reads."""

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        content = data if isinstance(data, bytes) else str(data).encode()
        super().put(zlib.compress(content), filename)
        return str(self.get_file(filename))

    def get_file(self, filename: str) -> str | None:
        if not self.has_file(filename):
            return None
        plain = Path(os.environ[FOLDER], self.key, filename)
        plain.parent.mkdir(parents=True, exist_ok=True)
        plain.write_bytes(zlib.decompress(Path(self.cache_dir, filename).read_bytes()))
        return str(plain)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        return self.put("\n".join(group), f"__grp__{filename}")

    def get_group(self, filename: str) -> dict[str, str] | None:
        listed = self.get_file(f"__grp__{filename}")
        if listed is None:
            return None
        found = {name: self.get_file(name) for name in Path(listed).read_text().splitlines()}
        return {name: path for name, path in found.items() if path is not None}


class Backend(RemoteCacheBackend):
    """A remote cache in this process: what Redis is to Triton's own."""

    KEPT: ClassVar[dict[tuple[str, str], bytes]] = {}
    ASKED: ClassVar[list[str]] = []

    def __init__(self, key: str) -> None:
        self._key = key

    def get(self, filenames: Any) -> dict[str, bytes]:
        self.ASKED.extend(filenames)
        return {name: self.KEPT[self._key, name] for name in filenames if (self._key, name) in self.KEPT}

    def put(self, filename: str, data: bytes) -> None:
        self.KEPT[self._key, filename] = data


Remote = RemoteCacheManager


class Refuses(CacheManager):
    """Cannot even be made."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        raise ConnectionRefusedError("the server is away")

    get_file = put = get_group = put_group = None


class _Fails(Shared):
    failing = ""

    def __getattribute__(self, name: str) -> Any:
        if name != "failing" and name == type(self).failing:
            raise ValueError(f"{name} is broken")
        return super().__getattribute__(name)


class FailsGetGroup(_Fails):
    failing = "get_group"


class FailsPut(_Fails):
    failing = "put"


class FailsPutGroup(_Fails):
    failing = "put_group"


class Garbage(Shared):
    """Answers with what is no answer."""

    def get_group(self, filename: str) -> Any:
        return {"../../etc/passwd": "/etc/passwd", filename: 7}

    def put(self, data: Any, filename: str, binary: bool = True) -> Any:
        return None


class NoManager:
    """Of another kind altogether."""
