"""A base for what is closed when its `with` block ends. Imported by every process."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any


class Closing(AbstractContextManager[Any]):
    """A context manager that yields itself and closes itself, whatever ended the block."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held; harmless when it was done before."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
