"""Reading JSON that a user may have written: an error names the field that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Fields:
    """A JSON object, and where in the file it stands.

    Attributes:
        raw: the parsed object.
        path: the keys that lead to it, as in ``"intra.bus"``; "" for the top level.

    Raises:
        ValueError: from the constructor and from every method that reads a field.
    """

    raw: dict[str, object]
    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.raw, dict):
            raise ValueError(f"{self.path or 'the top level'} must be an object")

    def path_of(self, key: str) -> str:
        """Return the keys that lead to the field ``key`` of this object."""
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str, kind: type[T], description: str) -> T:
        """Return a field of type ``kind``; ``description`` tells the user what it must be."""
        value = self.raw.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self._wrong_type(key, description)
        return value

    def number(self, key: str) -> float:
        """Return a field that is a number."""
        value = self.raw.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong_type(key, "a number")
        return float(value)

    def nested(self, key: str) -> Fields:
        """Return a field that is an object itself."""
        return Fields(self.value(key, dict, "an object"), self.path_of(key))

    def build(self, factory: Callable[..., T], **arguments: object) -> T:
        """Return ``factory(**arguments)``; a ValueError that it raises gets this object's path."""
        try:
            return factory(**arguments)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _wrong_type(self, key: str, description: str) -> ValueError:
        return ValueError(f"{self.path_of(key)} is {self.raw.get(key)!r}: must be {description}")
