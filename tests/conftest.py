"""Bundles every test shares, made once a session from tiny random checkpoints; nothing is downloaded."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Processes that share the cores of one machine take a core each: threads that spin for one another's cores treble
# the time of both. Before torch is loaded, which counts them then.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

# Without a GPU Triton's kernels are interpreted; it asks when it is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parent.parent
# `import runtime` must never find a second copy of trt_spec.runtime (blueprint §2).
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import pytest  # noqa: E402
from _pytest.nodeid import coerce_node_id  # noqa: E402
from trt_spec.export.passes.quantise import Quantisation  # noqa: E402

from .kit import bundles, long_proofs, shares  # noqa: E402
from .kit.adapters import ROOM, Adapted, adapter_of  # noqa: E402
from .kit.bundles import Pair, export_pair, noisy_draft, pair_of, tiny_pair  # noqa: E402
from .kit.families import tiny_checkpoint  # noqa: E402
from .kit.foreign import merging_draft  # noqa: E402
from .kit.headed import Headed, in_a_bundle  # noqa: E402
from .kit.heads import dflash_head, eagle3_head, look_aheads, mtp_head, parallel_heads  # noqa: E402
from .kit.hybrids import Hybrid, hybrid  # noqa: E402
from .kit.models import tiny_gemma2, tiny_gpt2, tiny_llama  # noqa: E402
from .kit.seeing_models import Seeing, export_seeing  # noqa: E402
from .kit.source_models import noisy_copy, tiny_with_source  # noqa: E402

KNOWN, MASK = 48, 70  # tokens that a head proposes, and one that no text has

# A tied random Gemma2 repeats its last token for ever.
FAMILIES = {"llama": (tiny_llama, {}), "gpt2": (tiny_gpt2, {}), "gemma2": (tiny_gemma2, {"tie_word_embeddings": False})}


def pytest_addoption(parser: pytest.Parser) -> None:
    shares.add_option(parser)
    long_proofs.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(long_proofs.LongProofs(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process works alone at the end.

    xdist 3.8 writes an item's group where pytest 9.2 does not look, and would spread the group over all processes.
    """
    shares.keep_one_share(config, items)
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    for item in items:
        if (grouped := vars(item).get("_nodeid")) is not None:
            item._id = coerce_node_id(grouped)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Neighbours stay in one process, which makes what they share once; one that has no tests left takes of others'."""
    if config.getoption("dist") == "load":
        from xdist.scheduler import WorkStealingScheduling

        return WorkStealingScheduling(config, log)
    return None


def pytest_collection_finish() -> None:
    """Libraries stay as they are: each export collects garbage, and need not look through all of theirs."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def exports(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    bundles.exports = (own.parent if worker else own) / "exports"
    bundles.exports.mkdir(exist_ok=True)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory):
    """`pairs(family)`: a tiny target of this family with a draft that agrees with it often, not always."""
    made: dict[str, Pair] = {}

    def pair(family: str) -> Pair:
        if family not in made:
            make, config = FAMILIES[family]
            made[family] = tiny_pair(make, tmp_path_factory.mktemp(family), noise=0.05, **config)
        return made[family]

    return pair


@pytest.fixture(scope="session")
def llama(pairs) -> Pair:
    return pairs("llama")


@pytest.fixture(scope="session")
def adapted(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """The same pair with room for adapters, and two of them: of all layers, and of some by another scale."""
    folder = tmp_path_factory.mktemp("adapted")
    room = export_pair(llama.checkpoint, folder / "target", **ROOM)
    pair = pair_of(room, noisy_draft(room.bundle, folder / "bundle", 0.05))
    wide = adapter_of(pair.checkpoint, folder / "wide", target_modules="all-linear")
    patterns = {"rank_pattern": {"q_proj": 2, "1.mlp.down_proj": 8}, "alpha_pattern": {"0.self_attn.q_proj": 32}}
    narrow = adapter_of(
        pair.checkpoint, folder / "narrow", 5, target_modules=["q_proj", "down_proj"], use_rslora=True, **patterns
    )
    return Adapted(pair, {"wide": wide, "narrow": narrow})


@pytest.fixture(scope="session")
def lengthy(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One layer over prompts of several chunks."""
    folder = tmp_path_factory.mktemp("lengthy")
    return tiny_pair(tiny_llama, folder, noise=0.05, num_hidden_layers=1, max_position_embeddings=2048)


@pytest.fixture(scope="session")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A vocabulary of 8 tokens, so that every continuation can be counted; the draft is far from the target."""
    folder = tmp_path_factory.mktemp("eight")
    return tiny_pair(tiny_llama, folder, noise=0.5, vocab=8, num_hidden_layers=1, initializer_range=0.25)


@pytest.fixture(scope="session")
def twin(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The draft is the target."""
    return pair_of(llama, noisy_draft(llama.bundle, tmp_path_factory.mktemp("twin"), noise=0.0))


@pytest.fixture(scope="session")
def drafts(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The same target and draft, and a second draft that agrees less often."""
    return pair_of(llama, noisy_draft(llama.bundle, tmp_path_factory.mktemp("drafts"), 0.2, seed=1, name="draft2"))


@pytest.fixture(scope="session")
def unequal(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft of another architecture and depth that was exported beside its target."""
    folder = tmp_path_factory.mktemp("unequal")
    draft = tiny_llama(folder / "draft", seed=5, num_hidden_layers=1, hidden_size=16, num_attention_heads=2)
    return export_pair(llama.checkpoint, folder / "bundle", draft)


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The trained pair the package ships."""
    shipped = ROOT / "tools" / "demo_pair"
    return export_pair(
        shipped / "pycode-14m", tmp_path_factory.mktemp("demo") / "bundle", shipped / "pycode-1m", max_length=1024
    )


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Hybrid]:
    """`hybrids(family)`: a recurrent target with a recurrent draft that agrees with it often, not always."""
    made: dict[str, Hybrid] = {}

    def of(family: str) -> Hybrid:
        if family not in made:
            made[family] = hybrid(family, tmp_path_factory.mktemp(family))
        return made[family]

    return of


@pytest.fixture(scope="session")
def telegrams(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The trained encoder–decoders the package ships."""
    shipped = ROOT / "tools" / "demo_pair"
    bundle = tmp_path_factory.mktemp("telegrams") / "bundle"
    return export_pair(shipped / "telegram-750k", bundle, shipped / "telegram-400k", max_length=256)


@pytest.fixture(scope="session")
def every_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Headed]:
    """A target with heads of all kinds, all in one bundle."""
    folder = tmp_path_factory.mktemp("headed")
    target = tiny_llama(folder / "target", padded_vocab=72, initializer_range=0.2, num_hidden_layers=3)
    heads = {
        "eagle3": eagle3_head(
            folder / "eagle3", target, KNOWN, scale=0.25, norm_before_residual=False, norm_output=False
        ),
        "mtp": mtp_head(folder / "mtp", target, scale=0.25),
        "peagle": eagle3_head(
            folder / "peagle", target, KNOWN, mask=MASK, layers=2, scale=0.25, norm_before_residual=False
        ),
        "dflash": dflash_head(folder / "dflash", target, "authors", mask=MASK, scale=0.2),
        "dspark": dflash_head(folder / "dspark", target, draft_vocab=KNOWN, mask=MASK, scale=0.3, rank=8, seed=3),
        "medusa": parallel_heads(folder / "medusa", target, "medusa", scale=0.2),
        "blockwise": parallel_heads(folder / "blockwise", target, "blockwise", scale=0.3),
    }
    return in_a_bundle(folder / "bundle", target, heads)


@pytest.fixture(scope="session")
def merging(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A draft that writes two letters in one token."""
    folder = tmp_path_factory.mktemp("merging")
    return export_pair(llama.checkpoint, folder / "bundle", merging_draft(folder / "draft"))


def with_source(kind: str, folder: Path) -> Path:
    """A target behind an encoder, with a draft that shares it, one that has its own, and one that has none."""
    target = tiny_with_source(kind, folder / "target")
    like = noisy_copy(kind, target, folder / "like", 0.05, encoder=False)
    other = noisy_copy(kind, target, folder / "other", 0.05, encoder=True)
    alone = tiny_checkpoint("llama", folder / "alone")
    return export_pair(target, folder / "bundle", [like, other, alone], max_length=128).bundle


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_source("t5", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_source("whisper", tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="session")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with look-aheads."""
    folder = tmp_path_factory.mktemp("ahead")
    target = tiny_llama(folder / "target", padded_vocab=72, initializer_range=0.2)
    return export_pair(target, folder / "bundle", look_aheads(folder / "head", target, 4)).bundle


@pytest.fixture(scope="session")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target that keeps latents in place of keys and values."""
    folder = tmp_path_factory.mktemp("latents")
    pair = export_pair(tiny_checkpoint("deepseek_v2", folder / "target"), folder / "alone")
    return pair_of(pair, noisy_draft(pair.bundle, folder / "bundle", noise=0.05))


@pytest.fixture(scope="session")
def in_few_bits(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`in_few_bits(weights)`: the target with weights of this kind, and a draft like it."""

    def of(weights: str) -> Path:
        folder = tmp_path_factory.mktemp(weights)
        return export_pair(llama.checkpoint, folder / "bundle", llama.checkpoint, weights=Quantisation(weights)).bundle

    return of


@pytest.fixture(scope="session")
def seeing_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seeing]:
    """Make tiny bundles that see, by the type of their checkpoints."""
    made: dict[str, Seeing] = {}

    def of(kind: str) -> Seeing:
        if kind not in made:
            made[kind] = export_seeing(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return of


@pytest.fixture(scope="session")
def llava(seeing_of: Callable[[str], Seeing]) -> Seeing:
    return seeing_of("llava")
