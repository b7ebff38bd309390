"""A tokenizer built from GGUF metadata is the one transformers builds; streams equal whole texts."""

# ruff: noqa: RUF001

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from baton.model.card import load_model
from baton.model.errors import ModelError
from baton.model.gguf_tokenizer import gguf_tokenizer
from baton.model.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\nnewlines\r\n\r\n\n  mixed   \t ",
    "def f(x):\n    return x ** 2  # comment\n\n\n",
    "12345 007 3.14159 1,000,000 x2y3 1st",
    "It's they'll we've I'm you'd DON'T 'S",
    "naïve café Zürich Ångström ß ﬁ ﬂ",
    "e\u0301 combining, nbsp\u00a0here, zero\u200bwidth, bom\ufeff",
    "日本語のテキスト。中文文本，标点！한국어 문장입니다.",
    "العربية עברית हिन्दी ไทย",
    "😀😃 👩‍👩‍👧‍👦 🇩🇪 👍🏽 ✈️",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_start|>  <|im_end|>x<|im_end",
    "<repo_name>a/b<file_sep>main.py",
    "a" * 300,
    "\x00\x01\x7f control",
    "https://example.org/path?q=1&r=%20#frag",
    "∑∫√≠ →⇒ “quotes” ‘single’ — dash…",
    '{"json": [1, 2.5, null, true], "é": "\\u00e9"}',
]


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return load_tokenizer(model_path)


@pytest.fixture(scope="module")
def oracle(model_path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(model_path.parent, gguf_file=model_path.name)


@pytest.mark.parametrize("text", CORPUS)
def test_gguf_tokenizer_equals_transformers(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special=False)
    assert ids == oracle(text, add_special_tokens=False).input_ids
    assert tokenizer.encode(text, add_special=True) == oracle(text).input_ids
    assert tokenizer.decode(ids, skip_special=False) == text


def test_every_token_has_its_bytes(tokenizer: Tokenizer) -> None:
    for text in CORPUS:
        ids = tokenizer.encode(text, add_special=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=150)
def test_streaming_gives_the_text_and_never_a_torn_character(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode(text, add_special=False)
    pieces = [stream.push(i) for i in ids]
    # A few bytes are not in this vocabulary, so the ids may say what is no character: that is left out.
    assert "".join(pieces) == b"".join(map(tokenizer.token_bytes, ids)).decode(errors="ignore")
    if b"".join(map(tokenizer.token_bytes, ids)) == text.encode():
        assert "".join(pieces) == text


def test_every_numeral_is_split_alone_as_the_model_was_trained(tokenizer: Tokenizer) -> None:
    # transformers ignores `tokenizer.ggml.pre` of a GGUF file and would join the space and the numeral here.
    pieces = [p for p, _ in tokenizer.backend.pre_tokenizer.pre_tokenize_str("a ½ 12")]
    assert pieces == ["a", "Ġ", "Â½", "Ġ", "1", "2"]


@given(st.lists(st.integers(0, 49151), max_size=40))
@settings(deadline=None, max_examples=150)
def test_streaming_any_ids_equals_decoding_them_at_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = tokenizer.stream()
    streamed = "".join(map(stream.push, ids))
    # Bytes that are no character are left out; the library shows them as U+FFFD.
    assert streamed.replace("\ufffd", "") == tokenizer.decode(ids).replace("\ufffd", "")
    spelled = b"".join(tokenizer.token_bytes(i) for i in ids if not tokenizer.is_special(i))
    assert streamed == spelled.decode(errors="ignore")
    assert tokenizer.spell(ids) == b"".join(map(tokenizer.token_bytes, ids)).decode(errors="ignore")


def test_special_tokens_are_not_text(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>", add_special=False)
    assert "".join(map(stream.push, ids)) == "hi"
    assert tokenizer.is_special(ids[0])


def _metadata(**changes: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ab", "<|end|>", "<tool>", "[PAD9]"]
    fields = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "merges": ["a b"],
        "token_type": [1] * len(alphabet) + [1, 3, 4, 5],
        "bos_token_id": len(tokens) - 3,
    }
    fields |= changes
    return {f"tokenizer.ggml.{k}": v for k, v in fields.items() if v is not None}


def test_token_types_decide_what_is_special() -> None:
    built = gguf_tokenizer(_metadata())
    tokenizer = Tokenizer(built.backend, built.digest)
    end, tool = tokenizer.backend.token_to_id("<|end|>"), tokenizer.backend.token_to_id("<tool>")
    ids = tokenizer.encode("ab<|end|><tool>[PAD9]", add_special=False)
    assert ids[1:3] == [end, tool]
    assert len(ids) == 3 + len("[PAD9]")
    assert tokenizer.is_special(end)
    assert not tokenizer.is_special(tool)
    assert tokenizer.decode(ids) == "ab<tool>[PAD9]"


def test_bos_is_added_to_raw_text_only_when_the_metadata_says_so() -> None:
    silent = gguf_tokenizer(_metadata())
    asked = gguf_tokenizer(_metadata(add_bos_token=True))
    llama = gguf_tokenizer(_metadata(pre="llama-bpe"))
    bos = asked.backend.token_to_id("<|end|>")
    assert silent.backend.encode("a").ids == silent.backend.encode("a", add_special_tokens=False).ids
    assert asked.backend.encode("a").ids[0] == bos
    assert llama.backend.encode("a").ids[0] == bos
    assert asked.backend.encode("a", add_special_tokens=False).ids[0] != bos


def test_qwen2_normalises_and_splits_digits_llama_takes_three() -> None:
    qwen, llama = gguf_tokenizer(_metadata()).backend, gguf_tokenizer(_metadata(pre="llama-bpe")).backend
    assert [piece for piece, _ in qwen.pre_tokenizer.pre_tokenize_str("12345")] == list("12345")
    assert [piece for piece, _ in llama.pre_tokenizer.pre_tokenize_str("12345")] == ["123", "45"]
    assert qwen.normalizer.normalize_str("e\u0301") == "é"
    assert llama.normalizer is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "llama"}, "'llama'"),
        ({"model": None}, "''"),
        ({"pre": "dbrx"}, "'dbrx'"),
        ({"merges": None}, "merges"),
        ({"tokens": []}, "tokens"),
        ({"token_type": [1]}, "token_type"),
        ({"merges": ["nothere q"]}, "merges"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        gguf_tokenizer(_metadata(**changes))


def test_a_directory_with_sentencepiece_style_tokenizer_streams_too(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "\u2581hi": 1, "\u2581you": 2, **{f"<0x{b:02X}>": 3 + b for b in range(256)}}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    stream = tokenizer.stream()
    emoji = [3 + byte for byte in "😀".encode()]
    assert [stream.push(i) for i in [1, 2, *emoji, 2]] == ["hi", " you", "", "", "", "😀", " you"]
    assert tokenizer.token_bytes(emoji[0]) == "😀".encode()[:1]
    assert tokenizer.token_bytes(2) == b" you"


def test_served_name_and_card_come_from_the_file(model_path: Path) -> None:
    model = load_model(model_path)
    assert model.name == "smollm2-135m-instruct"
    assert model.context_length == 8192
    assert model.generation.eos_ids == (2,)
    assert model.card == load_model(model_path).card
    assert len(model.key_root()) == 16
    assert model.key_root(salt="a") != model.key_root(salt="b")
