"""The service against its own description: generated requests, good and bad, and what they may be answered with."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from verl_bridge.retrieval.server import create_app
from verl_bridge.retrieval.service import RetrieverService

OPERATIONS = {
    "POST /search",
    "POST /retrieve",
    "POST /get_observation",
    "GET /adapter",
    "POST /adapter",
    "GET /health",
    "GET /metrics",
}
TAKES_INPUT = {"POST /search", "POST /retrieve", "POST /get_observation", "POST /adapter"}
# no JSON schema can say that lists are equally long, or that bytes are an adapter that fits
NOT_IN_A_SCHEMA = {
    "POST /get_observation": [checks.positive_data_acceptance],
    "POST /adapter": [checks.positive_data_acceptance],
}


@pytest.fixture(scope="module")
def api(places_file, places_index_folder, minilm):
    service = RetrieverService(
        corpus=str(places_file), index=str(places_index_folder), encoder=minilm, top_k=4, max_wait=0
    )
    app = create_app(service, max_queries=8, max_query_characters=200, max_top_k=50)
    return schemathesis.openapi.from_asgi("/openapi.json", app)


def operations(api):
    return {operation.label: operation for operation in (result.ok() for result in api.get_all_operations())}


def test_every_endpoint_is_described(api):
    assert set(operations(api)) == OPERATIONS


@pytest.mark.parametrize(
    ("label", "mode"),
    [(label, GenerationMode.POSITIVE) for label in sorted(OPERATIONS)]
    + [(label, GenerationMode.NEGATIVE) for label in sorted(TAKES_INPUT)],
)
def test_every_answer_is_as_described(api, label, mode):
    statuses = set()

    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operations(api)[label].as_strategy(generation_mode=mode))
    def check(case):
        answer = case.call_and_validate(excluded_checks=NOT_IN_A_SCHEMA.get(label, []))
        statuses.add(answer.status_code)

    check()
    assert (200 in statuses) == (mode is GenerationMode.POSITIVE and label != "POST /adapter")
