"""The eight phases: one name each, in config, registry, metrics, folders and command line."""

PHASES = (
    *("cognate", "evomerge", "quietstar", "bitnet"),
    *("forge", "baking", "edge", "final_compression"),
)
ORDER = ("toy", *PHASES)  # the toy shows how a phase is written; it stands alone and comes first


def phase_folder(phase_name: str) -> str:
    """Return the folder of a phase in a run directory and in the package: `phase2_evomerge`."""
    if phase_name not in PHASES:
        return phase_name
    return f"phase{PHASES.index(phase_name) + 1}_{phase_name}"


def source_of(phase_name: str) -> str | None:
    """Return the phase whose models this one is handed."""
    index = PHASES.index(phase_name) if phase_name in PHASES else 0
    return PHASES[index - 1] if index else None
