"""Whatever fits the OpenAPI document, or just does not, is no error of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from agent_forge.api.app import Serving, create_app
from agent_forge.pipeline import jobs
from agent_forge.store.sessions import SessionStore
from tests.support.serving import MODEL, small_model
from tests.support.toy_runs import toy_run

EXAMPLES = 12  # of an endpoint


@pytest.mark.slow
def test_no_input_is_an_error_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_model(tmp_path)
    toy_run(tmp_path)
    monkeypatch.setattr(jobs, "_spawn", lambda store, name, command: name)
    app = create_app(Serving(SessionStore(tmp_path)))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"Host": "localhost"})
    seen: dict[str, set[int]] = {}

    def ask(case: Any, **changes: Any) -> None:
        case.headers = {**(case.headers or {}), "Host": "localhost"}
        response = case.call(**changes)
        assert response.status_code < 500, (case.method, case.path, case.body, response.text)
        seen.setdefault(f"{case.method} {case.path}", set()).add(response.status_code)

    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any) -> None:
            ask(case)
            if isinstance(case.body, dict):
                if "model" in case.body:  # else hardly one would come so far
                    case.body["model"] = MODEL
                    case.body["max_tokens"] = 4
                    case.body["max_completion_tokens"] = 4
                ask(case)
            if "session" in (case.path_parameters or {}):
                case.path_parameters["session"] = "r"
                ask(case)

        given(operation.as_strategy())(check)()
    assert len(seen) == 14 and set.union(*seen.values()) >= {200, 202, 400, 404}
