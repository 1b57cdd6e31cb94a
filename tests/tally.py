"""Count the runs of programs, also extra runs, which put back all that they change in Python."""

from collections import Counter
from queue import SimpleQueue


class Tally:
    """Counts what programs add. A queue of C cannot be put back."""

    def __init__(self):
        self._queue = SimpleQueue()

    def add(self, name="run"):
        self._queue.put(name)

    def take(self):
        """Return the counts since the last call."""
        return Counter(self._queue.get() for _ in range(self._queue.qsize()))
