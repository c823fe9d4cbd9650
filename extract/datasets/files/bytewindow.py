"""A part of a file that moves over it, so that memory does not grow with the file."""

import re

from extract.datasets.files.filetypes import Readable

CHUNK = 1 << 20
_SPACE = re.compile(rb"\s*+")


class Window:
    """The part of a file that is looked at, and where it lies in the file."""

    def __init__(self, stream: Readable) -> None:
        """Begin before the first byte."""
        self._stream = stream
        self.bytes = b""
        self.start = 0  # offset of bytes[0] in the file
        self.is_last = False

    def advance(self, keep: int, size: int = CHUNK) -> bool:
        """Forget what lies before `keep` and read on; False at the end.

        Positions in `bytes` shrink by `keep`.
        """
        more = b"" if self.is_last else self._stream.read(size)
        self.bytes = self.bytes[keep:] + more
        self.start += keep
        self.is_last = not more
        return bool(more)

    def skip_space(self, at: int) -> int:
        """Return the position of the next byte that is no space; may be the end."""
        while True:
            at = _SPACE.match(self.bytes, at).end()
            if at < len(self.bytes):
                return at
            if not self.advance(at):
                return 0
            at = 0
