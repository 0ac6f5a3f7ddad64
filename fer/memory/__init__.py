"""Slabs, arenas and descriptors: memory that outlives the process that filled it.

``base.py`` holds the interface; ``host.py`` (sealed memfd) and ``cuda.py`` (VMM) stand behind it. Nothing here
imports torch or CUDA until a backend is opened.
"""
