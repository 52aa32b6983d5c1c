"""Read JSON that a user may have written; errors name the field that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Fields:
    """A JSON object and its path in the file.

    Attributes:
        raw: parsed object.
        path: keys that lead to the object, as in ``"intra.bus"``; "" for the top level.

    Raises:
        ValueError: ``raw`` is not an object. Methods raise it for a field that is missing or wrong.
    """

    raw: dict[str, object]
    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.raw, dict):
            raise ValueError(f"{self.path or 'the top level'} must be an object")

    def path_of(self, key: str) -> str:
        """Return the path of the field ``key`` of this object."""
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str, kind: type[T], description: str) -> T:
        """Return a field of type ``kind``; errors say that it must be ``description``."""
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
        """Return a field that is itself an object."""
        return Fields(self.value(key, dict, "an object"), self.path_of(key))

    def build(self, factory: Callable[..., T], **arguments: object) -> T:
        """Return ``factory(**arguments)``; prefix a ValueError that it raises with the path."""
        try:
            return factory(**arguments)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _wrong_type(self, key: str, description: str) -> ValueError:
        return ValueError(f"{self.path_of(key)} is {self.raw.get(key)!r}: must be {description}")
