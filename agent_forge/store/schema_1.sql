-- The registry's schema, step 1; `PRAGMA user_version` counts the steps that a database has seen. A
-- step that was released is never edited: a change is a further file. Differences from the
-- specification: times are UTC epoch seconds, references cascade, and a handoff's target model may
-- be unknown (the handoff is checked before the target phase has made one).
CREATE TABLE sessions (
    session_id TEXT PRIMARY KEY,
    pipeline_config_json TEXT NOT NULL,
    start_time REAL NOT NULL,
    end_time REAL,
    status TEXT NOT NULL CHECK (status IN ('running', 'completed', 'failed', 'paused')),
    current_phase TEXT,
    progress_percent REAL NOT NULL CHECK (progress_percent BETWEEN 0 AND 100),
    tags TEXT NOT NULL
);
CREATE TABLE models (
    model_id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE,
    phase_name TEXT NOT NULL,
    model_name TEXT NOT NULL,
    model_path TEXT NOT NULL,
    size_mb REAL,
    parameters INTEGER,
    created_at REAL NOT NULL,
    metadata_json TEXT NOT NULL,
    tags TEXT NOT NULL
);
CREATE INDEX idx_session ON models (session_id);
CREATE INDEX idx_phase ON models (phase_name);
CREATE INDEX idx_created ON models (created_at);
CREATE TABLE phase_handoffs (
    handoff_id TEXT PRIMARY KEY,
    source_phase TEXT NOT NULL,
    target_phase TEXT NOT NULL,
    source_model_id TEXT NOT NULL REFERENCES models ON DELETE CASCADE,
    target_model_id TEXT REFERENCES models ON DELETE CASCADE,
    handoff_timestamp REAL NOT NULL,
    validation_status TEXT NOT NULL
        CHECK (validation_status IN ('passed', 'failed', 'pending')),
    validation_metrics_json TEXT NOT NULL
);
CREATE INDEX idx_source ON phase_handoffs (source_model_id);
CREATE TABLE upkeep (completed_sessions INTEGER NOT NULL);
INSERT INTO upkeep VALUES (0);
