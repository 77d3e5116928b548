"""See the package."""

from __future__ import annotations

from triton.backends.driver import DriverBase

from tests.harness.interpreted_triton.compiler import _unused

Driver = type(
    "Driver",
    (DriverBase,),
    {**dict.fromkeys(DriverBase.__abstractmethods__, _unused), "is_active": classmethod(lambda _: True)},
)
