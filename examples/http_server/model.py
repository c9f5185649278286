"""A small Llama with random weights, and its KV cache as chunks of bytes.

Outputs are the same bits with and without cached chunks, because a chunk is always
computed in one way: its tokens in one pass, after all tokens before it. Kernels may sum in
another order for another number of tokens; for a single one they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from examples.http_server.tokenizer import VOCABULARY

__all__ = ["Model", "Shape", "Tensors", "Token"]

HEAD = 64
"""Numbers of one attention head."""

Tensors = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer: batch of one, heads, tokens, numbers of a head."""


@dataclass(frozen=True)
class Shape:
    """Everything that decides what the model computes.

    Attributes:
        layers: number of layers.
        hidden: width of a layer, a multiple of 64.
        context: most tokens of prompt and completion together.
        seed: of the random weights.
    """

    layers: int = 4
    hidden: int = 256
    context: int = 8192
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """A token and the logarithm of its probability."""

    id: int
    logprob: float


class Model:
    """Computes on the processor, in the thread that calls.

    Attributes:
        name: by which clients ask for it.
        chunk_tokens: tokens of one chunk.
        chunk_bytes: bytes of their keys and values in all layers.
        context: most tokens of prompt and completion together.
    """

    def __init__(self, shape: Shape, chunk_tokens: int) -> None:
        heads = shape.hidden // HEAD
        self.name = f"random-llama-{shape.layers}x{shape.hidden}"
        self.chunk_tokens = chunk_tokens
        self.context = shape.context
        self._shape = shape
        self._config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.hidden,
            intermediate_size=2 * shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=shape.context,
            # Wide enough that layers add as much as they pass on: every answer depends on
            # all of its prompt.
            initializer_range=shape.hidden**-0.5,
            bos_token_id=None,
            eos_token_id=None,
            dtype="float32",
        )
        torch.manual_seed(shape.seed)
        self._model: torch.nn.Module = LlamaForCausalLM(self._config)
        self._model.eval()
        # Layers, keys and values, heads, tokens, numbers of a head.
        self._chunk = (shape.layers, 2, heads, chunk_tokens, HEAD)
        self.chunk_bytes = 4 * int(np.prod(self._chunk))

    @property
    def identity(self) -> dict[str, str | int]:
        """What must be equal for chunks to be used: kernels and threads decide bits, too."""
        return {
            "model": self.name,
            **asdict(self._shape),
            "chunk_tokens": self.chunk_tokens,
            "layout": "layer, key or value, head, token, float32",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "processor": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }

    def feed(self, past: DynamicCache, tokens: Sequence[int]) -> Token:
        """Compute `tokens` after those that `past` holds; returns the most likely next one."""
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([tokens]),
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
            logprobs = output.logits[0, -1].log_softmax(-1)
        best = int(logprobs.argmax())
        return Token(best, float(logprobs[best]))

    def tensors(self, past: DynamicCache) -> Tensors:
        """What `past` holds now. It stays so: `feed` makes new tensors."""
        return [(key, value) for key, value, _ in past]

    def chunks(self, tensors: Tensors, first: int, last: int) -> list[torch.Tensor]:
        """Chunks `first` to `last`, `last` not included, each a tensor of `chunk_bytes`."""
        size = self.chunk_tokens
        chunks = []
        for start in range(first * size, last * size, size):
            parts = [part[0, :, start : start + size] for layer in tensors for part in layer]
            chunks.append(torch.stack(parts))
        return chunks

    def past(self, chunks: Sequence[memoryview] = ()) -> DynamicCache:
        """A cache that holds a copy of `chunks`, the first chunks of a prompt."""
        if not chunks:
            return DynamicCache(config=self._config)
        layers, two, heads, size, head = self._chunk
        whole = torch.empty(layers, two, 1, heads, len(chunks) * size, head)
        target = whole.numpy()
        for index, chunk in enumerate(chunks):
            place = slice(index * size, (index + 1) * size)
            target[:, :, 0, :, place] = np.frombuffer(chunk, np.float32).reshape(self._chunk)
        return DynamicCache([(layer[0], layer[1]) for layer in whole], config=self._config)

    def beginning(self, tensors: Tensors, tokens: int) -> DynamicCache:
        """A cache that holds the first `tokens` tokens of `tensors`."""
        if not tokens:
            return self.past()
        parts = [(key[:, :, :tokens], value[:, :, :tokens]) for key, value in tensors]
        return DynamicCache(parts, config=self._config)
