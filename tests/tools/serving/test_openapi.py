"""The page /openapi.json says what the server does: schemathesis sends what it allows, and what it does not."""

import json
from collections.abc import Callable

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from trt_spec.runtime import Decoder
from trt_spec.tools.serving.app import make_app
from trt_spec.tools.serving.keys import Keys
from trt_spec.tools.serving.service import open_service

from ...kit.bundles import Pair
from .conftest import Served, serving

POSTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/apply-template",
    "/tokenize",
    "/detokenize",
)
CORE = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")  # what the others are translated to
GETS = (
    "/v1/models",
    "/v1/models/{model}",
    "/v1/responses/{response_id}",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/openapi.json",
)
HEARD = ("/v1/audio/transcriptions", "/v1/audio/translations")
REFUSED = ["400", "404", "413", "415", "422"]  # 413: a list with too many places may make the body too long, told first
load_all_checks()


def probe(served: Served, path: str, method: str, mode: GenerationMode, examples: int) -> None:
    config = schemathesis.Config.from_dict({"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}})
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json", config=config)
    strategy = schema[path][method].as_strategy(generation_mode=mode)
    once = settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
        database=None,
    )

    # What a schema cannot say: rules across fields, and that prompt and output together fit the model.
    excluded = [positive_data_acceptance] if path in POSTS or "response_id" in path else []

    def send(case: schemathesis.Case) -> None:
        case.call_and_validate(timeout=60, excluded_checks=excluded)

    run: Callable[[], None] = once(given(strategy)(send))
    run()


def test_every_path_of_the_server_is_on_the_page_and_no_other(served: Served):
    page = served.http.get("/openapi.json").json()
    routes = {route.path.replace(":path", "") for route in make_app(served.service, Keys()).routes}
    assert set(page["paths"]) == routes == {*POSTS, *GETS, *HEARD}
    assert page["openapi"] == "3.1.0"


def test_the_page_leaves_out_metrics_that_have_a_port_of_their_own(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        app = make_app(open_service(decoder), Keys(), metrics_apart=True)
    page = json.loads(app.state.openapi.body)
    assert set(page["paths"]) == {*POSTS, *GETS, *HEARD} - {"/metrics"}


@pytest.mark.parametrize("path", GETS)
def test_what_is_asked_for_is_as_the_page_says(served: Served, path: str):
    probe(served, path, "GET", GenerationMode.POSITIVE, 3)


def test_a_server_with_keys_asks_for_them_on_its_page(llama: Pair):
    with serving(llama, keys=["one"]) as server:
        headers = {"authorization": "Bearer one"}
        page = server.http.get("/openapi.json", headers=headers).json()
    open_paths = [path for path, each in page["paths"].items() for one in each.values() if "security" not in one]
    assert open_paths == ["/health", "/ready"]


@pytest.mark.parametrize("path", POSTS)
def test_what_the_page_forbids_is_refused(served: Served, path: str):
    probe(served, path, "POST", GenerationMode.NEGATIVE, 15)


@pytest.mark.parametrize("path", POSTS)
def test_what_the_page_allows_is_answered_as_it_says(served: Served, path: str):
    probe(served, path, "POST", GenerationMode.POSITIVE, 15)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", POSTS)
def test_schemathesis_finds_nothing(served: Served, path: str, mode: GenerationMode):
    probe(served, path, "POST", mode, 200 if path in CORE else 80)
