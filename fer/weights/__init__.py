"""Stage one: the weights of a dead engine, back in a new process. Reading this package imports no torch."""
