"""A deployment on Ray Serve: replicas come and go with the load, each with a decoder and a thread that steps.

python tools/examples/ray_serve.py bundle [engine [device]]
"""

import sys
from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from trt_spec.engines import Bundle
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.serving.stepper import Stepper
from trt_spec.tools.serving.tickets import Submission


@serve.deployment(max_ongoing_requests=64, autoscaling_config={"min_replicas": 1, "target_ongoing_requests": 16})
class Replica:
    async def __init__(self, bundle: str, engine: str, device: str) -> None:  # type: ignore[misc]  # Ray awaits it
        self.decoder = Decoder.open(bundle, engine, device, max_batch=16, prefix_bytes=2**28)
        self.stepper = Stepper(self.decoder, max_waiting=64, on_end=lambda ticket: None)
        self.stepper.start()

    async def complete(self, prompt: list[int], **params: Any) -> AsyncIterator[list[int]]:
        group = self.stepper.submit([Submission(prompt, SamplingParams(**params))], every_round=True)
        try:
            ended = False
            while not ended:
                [(_, pieces, ended)] = await group.progress()
                yield [token for piece in pieces for token in piece.token_ids]
            group.output(0)  # raises what ended it before its time
        finally:
            group.cancel()

    def check_health(self) -> None:
        assert self.stepper.alive


def main(bundle: str, engine: str = "onnxruntime", device: str = "cpu") -> None:
    serve.start(proxy_location="Disabled")  # asked by its handle alone; with FastAPI it would listen
    gpus = Bundle.open(bundle).target.contract.shards if device == "cuda" else 0  # all of one node
    replica = Replica.options(ray_actor_options={"num_gpus": gpus}).bind(bundle, engine, device)  # type: ignore[attr-defined]
    handle: DeploymentHandle = serve.run(replica).options(stream=True)
    for tokens in handle.complete.remote([1, 2, 3], max_new_tokens=32):
        print(*tokens, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
