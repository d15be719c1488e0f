"""Property tests here have no deadline of their own: machines differ."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("tunewright", deadline=None, database=None, max_examples=100)
settings.load_profile("tunewright")
