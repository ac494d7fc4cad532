"""What the registry returns: a typed mapping for each of its tables; times in UTC seconds."""

from __future__ import annotations

from typing import Any, TypedDict


class SessionRow(TypedDict):
    session_id: str
    pipeline_config_json: str
    start_time: float
    end_time: float | None
    status: str
    current_phase: str | None
    progress_percent: float
    tags: list[str]


class ModelRow(TypedDict):
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


class HandoffRow(TypedDict):
    handoff_id: str
    source_phase: str
    target_phase: str
    source_model_id: str
    target_model_id: str | None
    handoff_timestamp: float
    validation_status: str
    validation_metrics: dict[str, Any]
