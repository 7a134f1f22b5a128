"""A service: one thread steps, other threads ask, and each error is raised to its owner.

python tools/examples/service.py bundle
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from trt_spec.runtime import Decoder


class Service:
    def __init__(self, bundle: str) -> None:
        self.decoder = Decoder.open(bundle, max_batch=8)
        self.work, self.closing = threading.Event(), False
        self.thread = threading.Thread(target=self.keep_stepping)
        self.thread.start()

    def keep_stepping(self) -> None:
        while not self.closing:
            try:
                if not self.decoder.step() and self.work.wait():
                    self.work.clear()
            except Exception as error:  # it has ended the requests of this round; the next ones may go on
                print(f"a round failed: {error}", file=sys.stderr)

    def complete(self, prompt: str) -> str:
        # The stepping thread calls on_progress after each round, so it has to return soon.
        request = self.decoder.submit(prompt, on_progress=lambda one: print(len(one.token_ids), "tokens"))
        self.work.set()
        request.wait()
        return prompt + request.output().text  # raises the error of a request that failed

    def close(self) -> None:
        self.closing = True
        self.work.set()
        self.thread.join()
        self.decoder.close()


def main(bundle: str, *prompts: str) -> None:
    with closing(Service(bundle)) as service, ThreadPoolExecutor() as clients:
        answers = [clients.submit(service.complete, prompt) for prompt in prompts or ("def f(", "class Stack:", "")]
    print(*(answer.exception() or answer.result() for answer in answers), sep="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
