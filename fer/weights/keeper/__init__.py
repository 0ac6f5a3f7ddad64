"""The keeper: a small process that holds editions. Loads nothing by itself; see ``server.py`` for the loop."""
