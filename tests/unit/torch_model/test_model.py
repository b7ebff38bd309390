"""The forward pass against transformers, family by family, however the work is cut into steps."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from baton.engine.torch.batch import Batch
from baton.engine.torch.config import load_config
from baton.engine.torch.kvpool import KvPool
from baton.engine.torch.model import GivenUp, Model
from baton.engine.torch.weights import load_weights
from baton.model.tokenizer import load_tokenizer
from tests.unit.torch_model.files import KINDS, write_directory, write_gguf
from tests.unit.torch_model.run import BLOCK, Run, open_torch_model

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    directory = tmp_path_factory.mktemp(request.param)
    return write_directory(directory, request.param), directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    directory = tmp_path_factory.mktemp("tiny")
    return write_directory(directory, "llama"), directory


def ids_of(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def expected(oracle: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return oracle(torch.tensor([ids])).logits[0]


def test_logits_of_every_position(pair: tuple[PreTrainedModel, Path]) -> None:
    oracle, path = pair
    ids = ids_of(200)
    run = Run(open_torch_model(path))
    found = torch.cat([run.step(run.slice("a", ids[at : at + 77], "all")) for at in range(0, len(ids), 77)])
    torch.testing.assert_close(found, expected(oracle, ids), **CLOSE)


def test_decoding_one_by_one(pair: tuple[PreTrainedModel, Path]) -> None:
    oracle, path = pair
    ids = ids_of(100, seed=1)
    run = Run(open_torch_model(path))
    run.step(run.slice("a", ids[:30], "none"))
    found = torch.cat([run.step(run.slice("a", [token])) for token in ids[30:]])
    torch.testing.assert_close(found, expected(oracle, ids)[30:], **CLOSE)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_the_same_model_as_a_gguf(tmp_path: Path, kind: str) -> None:
    """Query and key rows of llama files come interleaved; an error there leaves fluent but wrong numbers."""
    oracle = write_directory(tmp_path / "hf", kind)
    write_gguf(tmp_path / "m.gguf", oracle, gguf.GGMLQuantizationType.F32)
    ids = ids_of(70)
    run = Run(open_torch_model(tmp_path / "m.gguf"))
    torch.testing.assert_close(run.step(run.slice("a", ids, "all")), expected(oracle, ids), **CLOSE)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_of_any_batch_gives_the_same(tiny: tuple[PreTrainedModel, Path], data: st.DataObject) -> None:
    """Sequences of all lengths, cut into chunks at random, mixed in each step at random, over NaN-filled memory."""
    oracle, path = tiny
    lengths = data.draw(st.lists(st.integers(1, 130), min_size=1, max_size=6))
    prompts = {str(i): ids_of(length, seed=i) for i, length in enumerate(lengths)}
    run = Run(open_torch_model(path), seed=data.draw(st.integers(0, 99)))
    found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    while True:
        left = [n for n in prompts if run.lengths.get(n, 0) < len(prompts[n])]
        if not left:
            break
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True))
        slices = []
        for name in chosen:
            at = run.lengths.get(name, 0)
            count = data.draw(st.sampled_from([1, 1, 2, 31, 32, 33, 200]))
            slices.append(run.slice(name, prompts[name][at : at + count], "all"))
        rows = run.step(*slices)
        for name, part in zip(chosen, rows.split([len(s.token_ids) for s in slices]), strict=True):
            found[name].append(part)
    for name, ids in prompts.items():
        torch.testing.assert_close(torch.cat(found[name]), expected(oracle, ids), **CLOSE)


def test_a_pass_writes_only_the_blocks_it_was_given(tiny: tuple[PreTrainedModel, Path]) -> None:
    _, path = tiny
    run = Run(open_torch_model(path, fill=7.0))
    shared = ids_of(2 * BLOCK)
    run.step(run.slice("a", shared, "none"))
    before = run.model.pool.tensor.clone()
    # A second sequence over the first one's blocks, as a prefix hit.
    run.tables["b"], run.lengths["b"] = list(run.tables["a"]), 2 * BLOCK
    run.step(run.slice("b", ids_of(5, seed=1), "none"), run.slice("c", ids_of(40, seed=2), "none"))
    own = {run.tables["b"][2], *run.tables["c"]}
    others = [slot for slot in range(run.model.pool.slots) if slot not in own]
    assert torch.equal(run.model.pool.tensor[others], before[others])
    assert not torch.equal(run.model.pool.tensor[sorted(own)], before[sorted(own)])


def test_a_shared_prefix_gives_what_computing_it_gives(tiny: tuple[PreTrainedModel, Path]) -> None:
    oracle, path = tiny
    run = Run(open_torch_model(path))
    ids = ids_of(80)
    run.step(run.slice("a", ids, "none"))
    run.tables["b"], run.lengths["b"] = run.tables["a"][:2], 2 * BLOCK
    found = run.step(run.slice("b", ids[2 * BLOCK :], "all"))
    torch.testing.assert_close(found, expected(oracle, ids)[2 * BLOCK :], **CLOSE)


def test_a_pass_that_was_given_up_is_computed_again(tiny: tuple[PreTrainedModel, Path]) -> None:
    oracle, path = tiny
    run = Run(open_torch_model(path), seed=3)
    ids, layers = ids_of(70), run.model.config.layers
    run.step(run.slice("a", ids[:40], "none"))
    rest = run.slice("a", ids[40:], "all")
    for passed in range(layers):
        with pytest.raises(GivenUp):
            run.model.forward_and_sum(Batch([rest]), iter([True] * passed + [False]).__next__)
    found = run.step(rest)
    torch.testing.assert_close(found, expected(oracle, ids)[40:], **CLOSE)


def test_which_rows_are_wanted(tiny: tuple[PreTrainedModel, Path]) -> None:
    oracle, path = tiny
    run = Run(open_torch_model(path))
    a, b, c = ids_of(10, 1), ids_of(20, 2), ids_of(5, 3)
    found = run.step(run.slice("a", a, "none"), run.slice("b", b, "last"), run.slice("c", c, "all"))
    wanted = torch.cat((expected(oracle, b)[-1:], expected(oracle, c)))
    torch.testing.assert_close(found, wanted, **CLOSE)
    assert run.step(run.slice("a", [5], "none")).shape == (0, 96)


def test_bfloat16_stays_near_float32(pair: tuple[PreTrainedModel, Path]) -> None:
    oracle, path = pair
    ids = ids_of(120)
    run = Run(open_torch_model(path, dtype=torch.bfloat16))
    found = run.step(run.slice("a", ids, "all"))
    assert found.dtype == torch.float32
    exact = expected(oracle, ids)
    similarity = torch.cosine_similarity(found, exact, dim=-1)
    assert similarity.min() > 0.99


def test_a_pool_of_another_shape_is_refused(tiny: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    _, path = tiny
    write_directory(tmp_path, "qwen3")
    config, other = load_config(path), load_config(tmp_path)
    weights = load_weights(path, config, torch.float32)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    with pytest.raises(ValueError, match="pool"):
        Model(config, weights, KvPool(memory, other, torch.float32))
    with pytest.raises(ValueError, match="pool"):
        Model(config, weights, KvPool(memory, config, torch.bfloat16))


PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):",
    "<|im_start|>user\nWhat is a block cache?<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Water boils at a lower temperature on a mountain because",
    "Dear Sir or Madam,\n\nI am writing to",
    "List three differences between TCP and UDP.\n\n1.",
]


@pytest.mark.slow
@pytest.mark.slow
def test_greedy_float32_equals_transformers(model_path: Path) -> None:
    """64 greedy tokens of 8 prompts, alone and in one batch with prompts in chunks. That the oracle, shown the whole
    text, picks each token from those before it is what greedy decoding with it would give."""
    tokenizer = load_tokenizer(model_path)
    model = open_torch_model(model_path, slots=200, fill=0.0)
    prompts = {text: tokenizer.encode(text, add_special=False) for text in PROMPTS}
    alone = {text: Run(model).greedy({text: ids}, 64)[text] for text, ids in prompts.items()}
    together = Run(model, seed=1).greedy(prompts, 64, chunk=7)
    assert together == alone
    oracle = AutoModelForCausalLM.from_pretrained(
        model_path.parent, gguf_file=model_path.name, dtype=torch.float32
    ).eval()
    for text, ids in prompts.items():
        picked = expected(oracle, ids + alone[text])[len(ids) - 1 : -1].argmax(-1).tolist()
        assert picked == alone[text], text
