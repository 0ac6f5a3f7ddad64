"""Keeping an engine in service: its launcher, its supervision, and the address that clients see."""
