"""The CUDA graph stage: graphs captured once are rebuilt in later processes. Import-free, since parts need no torch."""
