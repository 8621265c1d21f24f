"""Continuous batching over paged key/value blocks. The public noun is `Sampler` (in `sampler.py`)."""
