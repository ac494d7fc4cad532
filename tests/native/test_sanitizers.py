"""No input makes the C code read or write where it must not: sanitizers end it if one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import native_fuzz
from tests.support.native_build import CAN_BUILD, build

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ROUNDS = 90


@pytest.mark.skipif(not CAN_BUILD, reason="there is no compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="the library is preloaded as on Linux")
def test_fuzzed_networks_are_read_or_refused(tmp_path: Path) -> None:
    build(tmp_path, *FLAGS)
    asked = ["gcc", "-print-file-name=libasan.so"]
    library = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps memory to its end
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, native_fuzz.__file__, str(tmp_path), "0", str(ROUNDS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    read, refused = map(int, done.stdout.split())
    assert (read, refused) == (ROUNDS / 3, ROUNDS * 2 / 3)
