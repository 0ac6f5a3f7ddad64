"""The ``fer`` command."""
