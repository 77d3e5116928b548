"""``functools.cached_property`` without a lock."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

__all__ = ["cached_property"]

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property  # noqa: TID251
else:

    class cached_property:  # noqa: N801 (the standard name)
        """An attribute that a method computes on first access. Two threads may both compute it.

        Python 3.11 holds a lock for all objects of the class meanwhile. A process that is forked in that moment waits
        for this lock forever, for example a worker of a ``DataLoader``.
        """

        def __init__(self, compute: Any) -> None:
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._compute(instance)
            return value
