"""The native part as its sources are now, whether it is installed or not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.native_build import CAN_BUILD, NAME, build, load


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    if not CAN_BUILD:
        pytest.skip("there is no compiler")
    return load(build(tmp_path_factory.mktemp("native")))


@pytest.fixture
def native(compiled: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in ("FORGE_NO_NATIVE", "FORGE_PLAIN_C"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, NAME, compiled)
    yield compiled
