"""What is recorded of sessions, models (to which phases add keys) and handoffs; times are UTC."""

from pathlib import Path
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_forge.errors import DamagedFile
from agent_forge.store import files

CARD = "README.md"
BAKING = "baking.json"  # how forge bake made a model
LEARNED = "learned.json"  # what a model in one file can
STATE_FILE = "state.json"  # the record of a phase, in its folder
Status = Literal["running", "completed", "failed", "paused"]
STEP_1 = Path(__file__).with_name("schema_1.sql").read_text(encoding="utf-8")
MIGRATIONS = (tuple(STEP_1.strip().split(";\n")),)  # the registry's schema in numbered steps


class SessionRow(TypedDict):
    """A row of the table `sessions`."""

    session_id: str
    pipeline_config_json: str
    start_time: float
    end_time: float | None
    status: str
    current_phase: str | None
    progress_percent: float
    tags: list[str]


class ModelRow(TypedDict):
    """A row of the table `models`; the path is absolute or relative to the working directory."""

    model_id: str
    session_id: str
    phase_name: str
    model_name: str
    model_path: str
    size_mb: float | None
    parameters: int | None
    created_at: float
    metadata: dict[str, Any]
    tags: list[str]


class HandoffRecord(BaseModel):
    """One offer of a model to the next phase, with what was measured and the outcome."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    handoff_id: str
    source_phase: str
    target_phase: str
    source_model_id: str
    target_model_id: str | None = Field(None, description="known once the target phase is done")
    handoff_timestamp: float = Field(description="UTC epoch seconds")
    validation_status: Literal["passed", "failed", "pending"]
    validation_metrics: dict[str, Any] = Field(description="the measured values that were judged")


class _Record(BaseModel):
    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=()
    )
    schema_version: Literal[1] = 1


ALWAYS_OURS = {"schema_version", "model_id", "phase_name"}  # of metadata.json


class SessionRecord(_Record):
    """session.json of a run directory."""

    session_id: str
    created_at: float = Field(description="UTC epoch seconds")
    ended_at: float | None = Field(None, description="UTC epoch seconds")
    status: Status
    config: dict[str, Any] = Field(description="the resolved config")
    tags: list[str]


class ModelMetadata(_Record):
    """metadata.json of a model directory."""

    model_id: str = Field(description="phase, name and session; unique in a registry")
    session_id: str = Field(description="the run that made the model")
    phase_name: str = Field(description="the phase that made it")
    model_name: str = Field(description="its name within the phase")
    created_at: float = Field(description="UTC epoch seconds")
    parameters: int = Field(ge=0, lt=2**63, description="number of weights; tied ones count once")
    tags: list[str] = Field(default_factory=list, description="for finding it again")
    size_mb: float = Field(ge=0, description="10^6 bytes of model.safetensors on disk")
    sha256: str = Field(description="of model.safetensors")
    tied_weights: dict[str, str] = Field(
        default_factory=dict, description="name -> name of the weight whose memory it shares"
    )


def read_metadata(path: Path) -> ModelMetadata:
    """Return metadata.json of a model directory, checked for its form."""
    place = path / "metadata.json"
    record = files.read_json(place)
    if isinstance(record, dict):
        files.refuse_newer(place, record)
    try:
        return ModelMetadata.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        problem = f"{field}: {first['msg']}" if field else first["msg"]
        raise DamagedFile(place, f"not the metadata of a model ({problem})") from error


def learned_record(folder: Path) -> dict[str, Any]:
    """What the record of a model says of it: of one that a phase made, that forge bake did, or that
    was in one file."""
    if (folder / "metadata.json").is_file() and _may_be_ours(folder / "metadata.json"):
        return read_metadata(folder).model_dump()
    place = next((folder / name for name in (BAKING, LEARNED) if (folder / name).is_file()), None)
    if place is None:
        return {}
    record = files.read_json(place)
    learned = record.get("learned", {}) if isinstance(record, dict) else {}
    return learned if isinstance(learned, dict) else {}


def _may_be_ours(path: Path) -> bool:
    """False for a metadata.json that another maker gave a model: it has nothing that ours has."""
    record = files.read_json(path)
    return not record or not isinstance(record, dict) or bool(ALWAYS_OURS & {*record})


def read_state(folder: Path) -> dict[str, Any] | None:
    """The record of a phase, or None if it has not begun; a damaged one counts as not begun."""
    try:
        return files.read_checked(folder / STATE_FILE)
    except (FileNotFoundError, DamagedFile):
        return None
