"""A random Llama small enough for tests, with a tokenizer: the same bytes for the same arguments."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

VOCAB = 320


def make_tiny_model(directory: Path, *, layers: int = 3, hidden: int = 64, context: int = 2048, seed: int = 1) -> Path:
    """Write the model to `directory` and return it. Weights are wide enough that greedy output does not repeat."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=VOCAB - 2,
        eos_token_id=VOCAB - 1,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(directory)

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate(alphabet)}
    vocab |= {"<bos>": VOCAB - 2, "<eos>": VOCAB - 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
    fast.save_pretrained(directory)
    return directory


@functools.cache
def _oracle(directory: Path) -> Any:
    import torch
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def greedy(directory: Path, prompt: list[int], tokens: int) -> list[int]:
    """What transformers in f32 generates greedily, end-of-text ignored: the oracle."""
    import torch

    model = _oracle(directory)
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        output = model(ids, use_cache=True)
        past, found = output.past_key_values, []
        for _ in range(tokens):
            found.append(int(output.logits[0, -1].argmax()))
            output = model(torch.tensor([[found[-1]]]), past_key_values=past, use_cache=True)
    return found
