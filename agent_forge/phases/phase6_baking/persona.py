"""Who a model can become: a persona that is shipped, or one of a file."""

from __future__ import annotations

from pathlib import Path

from agent_forge.config.load import read_one, validate
from agent_forge.data.exchanges import Persona
from agent_forge.errors import ConfigError

PERSONAS = Path(__file__).with_name("personas")


def load_persona(text: str) -> Persona:
    """The persona of this name, or of a YAML file."""
    shipped = sorted(path.stem for path in PERSONAS.glob("*.yaml"))
    path = PERSONAS / f"{text}.yaml" if text in shipped else Path(text)
    try:
        there = path.is_file()
    except (OSError, ValueError):  # no name of a file
        there = False
    if not there:
        text = text[:100]
        hint = f"one of {', '.join(shipped)}, or a YAML file"
        raise ConfigError(f"persona: there is no {text}", hint=hint)
    return validate(Persona, read_one(path), f"persona {text}")
