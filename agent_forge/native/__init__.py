"""The token step of packed models in C: one text, one token at a time.

| file | what is in it |
|---|---|
| decoder.py | from a network and its packing to the token step; the cache of a text |
| tiles.py | matrices in the order in which C reads them |
| module.c | the Python module: every size is checked here, before a pointer is used |
| network.h | the network as C sees it |
| step.h | the token step: embedding, blocks, memory, recursion, head |
| linear.h | sums and products: ternary, four bits, floats |
| plain.c, avx2.c | step.h for any processor, and for those with AVX2 |
| bundle.py, bundle.mk | a folder with a model and the program that runs it without Python |
| forge_run.c | that program; json.h, weights.h, entropy.h, tokenizer.h and unicode.h read files |

setup.py compiles it if there is a compiler; without one torch computes it, the same but for
last bits, which rounded inputs can tip to the next step. FORGE_NO_NATIVE=1 leaves it to torch,
FORGE_PLAIN_C=1 leaves AVX2 out.
"""

import contextlib
import importlib
import os
from typing import Any, Literal


def extension() -> Any:
    """The compiled module; None if it was not built, or is turned off."""
    if os.environ.get("FORGE_NO_NATIVE") != "1":
        with contextlib.suppress(ImportError):
            return importlib.import_module("agent_forge.native._native")
    return None


def backend() -> Literal["avx2", "c", "torch"]:
    """What computes the token step of a packed model."""
    if (module := extension()) is None:
        return "torch"
    return "avx2" if module.has_avx2() and os.environ.get("FORGE_PLAIN_C") != "1" else "c"
