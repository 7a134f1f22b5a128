"""Teach a draft or a head, as `flags/train.py` says."""

import argparse
import json
from functools import partial

from ..flags.train import given_settings
from ..making.distil_draft import distil
from ..making.prompts import chosen_prompts
from ..making.train_head import train_head
from ..training_settings import DRAFT


def run(arguments: argparse.Namespace) -> int:
    prompts = chosen_prompts(arguments.prompts, arguments.chat, arguments.target)
    teach = distil if arguments.kind == DRAFT else partial(train_head, arguments.kind)
    settings = given_settings(arguments)
    print(json.dumps(teach(arguments.target, arguments.out, prompts, arguments.steps, arguments.minutes, **settings)))
    return 0
