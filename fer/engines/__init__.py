"""The Engine protocol (``base.py``) and the adapters: the only rooms that know an engine's names."""
