"""The comparison of beam searches runs, and all that take part find the same texts."""

import pytest
from trt_spec.tools.research.searching import main

from ..kit.bundles import Pair

pytestmark = pytest.mark.research


def test_all_searches_take_turns_and_find_the_same(llama: Pair, capsys) -> None:
    few = ["--prompts", "1", "--max-new-tokens", "6", "--repeat", "1", "--num-beams", "2"]
    assert main([str(llama.bundle), "--checkpoint", str(llama.checkpoint), "--draft-lengths", "0,2", *few]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert rows[1:] == ["K 0", "K 2", "transformers"]
