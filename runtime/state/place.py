"""Says whether tensors lie on the host, which may then read them in the middle of a round."""

import torch

HOSTS = {"cpu"}  # types of devices; tests of recorded rounds, for which a CPU stands in as a GPU, empty it


def on_host(device: torch.device | str) -> bool:
    return torch.device(device).type in HOSTS
