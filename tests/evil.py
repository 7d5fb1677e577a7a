"""Define a pickle that runs code."""

from pathlib import Path


class Evil:
    """An object whose pickle creates a directory when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.mkdir, (self.marker,)
