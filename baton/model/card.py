"""A model as the frontend needs it, and its card: digests of everything that decides what a prompt's tokens are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from baton.kv.keys import Namespace
from baton.model.files import ModelFiles, open_model
from baton.model.generation import GenerationConfig, load_generation
from baton.model.identity import weights_identity
from baton.model.template import ChatTemplate, load_template
from baton.model.tokenizer import Tokenizer, load_tokenizer
from baton.v1.registry_pb2 import ModelCard

CARD_FIELDS = ("model", "weights", "tokenizer", "chat_template", "generation_config")


@dataclass(frozen=True)
class Model:
    """One served model: its text side (tokenizer, template, defaults) and its card. `path`: where it was read from."""

    path: Path
    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    generation: GenerationConfig
    context_length: int
    card: ModelCard
    hidden_size: int = 0
    """Numbers of an embedding; 0: not known."""

    def key_root(self, *, adapter: str = "", salt: str = "") -> bytes:
        """The root of this model's block keys for one tenant's salt."""
        return Namespace(self.card.weights, self.card.tokenizer, adapter, salt).root()


def load_model(path: str | Path, served_name: str = "", *, weights: bool = True) -> Model:
    """Load a model's text side from a directory or GGUF file; torch is not needed.

    Without `weights`, or where the directory has none, its card does not say which they are. Raises ModelError when the
    files cannot be used.
    """
    files = open_model(path)
    tokenizer = load_tokenizer(files)
    template = load_template(files, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    generation = load_generation(files)
    name = served_name or files.default_name
    card = ModelCard(
        model=name,
        weights=weights_identity(files) if weights and files.has_weights else "",
        tokenizer=tokenizer.digest,
        chat_template=template.digest,
        generation_config=generation.digest,
    )
    return Model(Path(path), name, tokenizer, template, generation, files.context_length, card, files.hidden_size)


def load_card(path: str | Path, served_name: str = "") -> ModelCard:
    """Only the card: what a worker compares with the frontend's. Raises ModelError."""
    return load_model(path, served_name).card


def card_difference(ours: ModelCard, theirs: ModelCard) -> list[str]:
    """Names of the fields in which two cards differ; empty when they agree. What one of them does not say is compared
    with nothing."""
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in CARD_FIELDS]
    return [name for name, our, their in pairs if our and their and our != their]


__all__ = ["CARD_FIELDS", "Model", "ModelFiles", "card_difference", "load_card", "load_model"]
