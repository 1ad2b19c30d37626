"""Tiny models built here, so that no test needs a network."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from infer.target import TargetModel

# Tiny models: a second thread costs more in waiting than it computes.
torch.set_num_threads(1)

TINY_VOCABULARY = 160
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PRINTABLE = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
TEXT = [
    "You are a helpful assistant. system user assistant",
    "What is the capital of France? Explain how the rain falls on the plain in one sentence.",
    "The answer is that there are three of them and the other one is in the house.",
    "Write a story about a horse and the rider who rides ahead of the carriage.",
]
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerBase:
    """A byte-level BPE over printable ASCII with ChatML's special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=PRINTABLE,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[2],
    )
    fast.chat_template = template
    return fast


def tiny_model(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A random Llama of three layers in float32."""
    settings: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).float().eval()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model


@pytest.fixture(scope="session")
def tiny_target() -> TargetModel:
    """A random float32 target with a small tokenizer and a chat template."""
    return TargetModel(tiny_model(), tiny_tokenizer(), "tiny")


@pytest.fixture(scope="session")
def tiny_target_folder(tiny_target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same target saved to a folder, as `TargetModel.load` takes it."""
    folder = tmp_path_factory.mktemp("tiny-target")
    tiny_target.model.save_pretrained(folder)
    tiny_target.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerBase]:
    """`tiny_tokenizer`, for tests that need another template."""
    return tiny_tokenizer


@pytest.fixture(scope="session")
def make_model() -> Callable[..., LlamaForCausalLM]:
    """`tiny_model`, for tests that need other weights or another configuration."""
    return tiny_model
