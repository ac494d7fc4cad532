"""The phases that exist, by name. Loading this imports none of them.

| file | what is in it |
|---|---|
| handoffs.py | what each phase requires of the models it is handed |
| phase1_cognate/ | three specialists from one trunk |
| phase2_evomerge/ | one model evolved from three |
| toy.py, toy_config.py | the smallest phase: shows how one is written |
| training.py | what training phases share: train, measure, compare, sample, save |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_forge.contract.phase import PhaseController

IMPLEMENTED = {
    "toy": "agent_forge.phases.toy:ToyPhase",
    "cognate": "agent_forge.phases.phase1_cognate.phase:CognatePhase",
    "evomerge": "agent_forge.phases.phase2_evomerge.phase:EvoMergePhase",
}
SUMMARY = {
    "toy": "train a linear model: shows how a phase is written",
    "cognate": "train three specialists from one trunk",
    "evomerge": "evolve the three into one",
    "quietstar": "teach it to think before it answers",
    "bitnet": "ternary weights",
    "forge": "train on at the edge of its ability",
    "baking": "tools and a persona",
    "edge": "pack it for a device",
    "final_compression": "compress to the honest limit",
}


def load_phase(name: str) -> type[PhaseController]:
    """The controller of a phase that exists."""
    module, _, attribute = IMPLEMENTED[name].partition(":")
    controller: type[PhaseController] = getattr(importlib.import_module(module), attribute)
    return controller
