"""The phases by name. This imports no phase.

| file | what is in it |
|---|---|
| phase1_cognate/ | three specialists from one trunk |
| phase2_evomerge/ | one model evolved from three |
| phase3_quietstar/ | a model that thinks before it answers |
| phase4_bitnet/ | ternary weights that keep what it knows |
| phase5_forge/ | larger tasks than it was taught, at the edge of its ability and beyond |
| phase6_baking/ | tools and a persona inside the weights |
| phase7_edge/ | fewer channels, heads and layers, for a device |
| phase8_final_compression/ | one file, as small as what it can do allows |
| phases.json | a line on each phase |
| toy.py, toy_config.py | the smallest phase: shows how one is written |
| allocation.py | how coarse each kind of matrix may be written, for a size of the file |
| compress.py | forge compress: any causal language model in one small file |
| quantise.py | forge quantize, and what it shares with forge compress |
| skills.py | what a model has learned: to be taught on, asked and compared while it gets smaller |
| training.py | what training phases share: train, measure, compare, sample, save |
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_forge.contract.phase import PhaseController

IMPLEMENTED = {
    "toy": "agent_forge.phases.toy:ToyPhase",
    "cognate": "agent_forge.phases.phase1_cognate.phase:CognatePhase",
    "evomerge": "agent_forge.phases.phase2_evomerge.phase:EvoMergePhase",
    "quietstar": "agent_forge.phases.phase3_quietstar.phase:QuietStarPhase",
    "bitnet": "agent_forge.phases.phase4_bitnet.phase:BitNetPhase",
    "forge": "agent_forge.phases.phase5_forge.phase:ForgePhase",
    "baking": "agent_forge.phases.phase6_baking.phase:BakingPhase",
    "edge": "agent_forge.phases.phase7_edge.phase:EdgePhase",
    "final_compression": (
        "agent_forge.phases.phase8_final_compression.phase:FinalCompressionPhase"
    ),
}
SUMMARY: dict[str, str] = json.loads(Path(__file__).with_name("phases.json").read_text())


def load_phase(name: str) -> type[PhaseController]:
    module, _, attribute = IMPLEMENTED[name].partition(":")
    controller: type[PhaseController] = getattr(importlib.import_module(module), attribute)
    return controller
