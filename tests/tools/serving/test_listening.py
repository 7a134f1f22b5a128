"""Claims about the addresses that the server takes."""

import pytest
from trt_spec.engines import RequestError
from trt_spec.tools.serving.listening import listen


def test_a_port_in_use_is_refused_in_a_sentence_that_names_it_once():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RequestError) as refused:
            listen("127.0.0.1", port)
    said = f"cannot listen on 127.0.0.1 port {port} (Address already in use); choose another --host or --port"
    assert str(refused.value) == said
