"""A pickle that does something."""

from pathlib import Path


class Evil:
    """A pickle of this makes a directory where it is read."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return Path.mkdir, (self.marker,)
