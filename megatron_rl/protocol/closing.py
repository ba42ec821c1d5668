"""A base class for objects that close at the end of a `with` block. Imported by every process."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any


class Closing(AbstractContextManager[Any]):
    """A context manager that yields itself and closes itself at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; a second call is harmless."""

    def __exit__(self, *error: object) -> None:
        self.close()
