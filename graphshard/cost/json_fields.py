"""Reading JSON that a user may have written: an error names the field that is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fields:
    """A JSON object and where it stands in the file.

    Raises:
        ValueError: from every method.
    """

    raw: dict[str, Any]
    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.raw, dict):
            raise ValueError(f"{self.path or 'the top level'} must be an object")

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str, kind: type | tuple[type, ...], what: str) -> Any:
        value = self.raw.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{self.at(key)} is {value!r}: must be {what}")
        return value

    def number(self, key: str) -> float:
        return float(self.value(key, (int, float), "a number"))

    def object(self, key: str) -> Fields:
        return Fields(self.value(key, dict, "an object"), self.at(key))

    def built(self, kind: Any, **values: Any) -> Any:
        """``kind(**values)``, made of this object."""
        try:
            return kind(**values)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
