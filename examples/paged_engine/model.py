"""A Llama with random weights over a paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Batch", "Llama", "ModelConfig"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model.

    Attributes:
        window: tokens that every second layer attends to, the token itself included; None: all.
    """

    vocab: int = 256
    layers: int = 4
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    max_tokens: int = 4096
    window: int | None = None
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def layer_windows(self) -> list[int | None]:
        """The window of each layer."""
        return [self.window if layer % 2 else None for layer in range(self.layers)]


@dataclass
class Batch:
    """What a step computes: the next tokens of several sequences.

    Attributes:
        tokens, positions: of all sequences, one after the other: (tokens,).
        rows, columns: where each of them is in a padded table of (sequences, most tokens).
        shape: of that table.
        slots: for each window the block and the place in it that each token is written to:
            two tensors of (tokens,).
        tables: for each window the blocks of each sequence: (sequences, most blocks).
        last: the last token of each sequence: (sequences,).
    """

    tokens: Tensor
    positions: Tensor
    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]
    slots: dict[int | None, tuple[Tensor, Tensor]]
    tables: dict[int | None, Tensor]
    last: Tensor


class Llama(nn.Module):
    """`forward` gives the logits of the last token of each sequence, and fills the KV cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        torch.manual_seed(config.seed)
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Layer(config, window) for window in config.layer_windows())
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        half = config.head_size // 2
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(config.max_tokens, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))
        self.to(device=config.device, dtype=config.dtype).requires_grad_(False)

    def new_kv_caches(self, num_blocks: int, block_tokens: int) -> list[Tensor]:
        """For each layer (blocks, keys and values, tokens, heads, size)."""
        c = self.config
        shape = (num_blocks, 2, block_tokens, c.kv_heads, c.head_size)
        return [torch.zeros(shape, dtype=c.dtype, device=c.device) for _ in range(c.layers)]

    def forward(self, batch: Batch, kv_caches: list[Tensor]) -> Tensor:
        x = self.embedding(batch.tokens)
        turn = self.cos[batch.positions][:, None], self.sin[batch.positions][:, None]
        masks: dict[int | None, Tensor] = {}
        for layer, kv_cache in zip(self.blocks, kv_caches, strict=True):
            if layer.window not in masks:
                masks[layer.window] = _mask(batch, layer.window, kv_cache.shape[2])
            x = layer(x, batch, turn, kv_cache, masks[layer.window])
        return self.head(self.norm(x[batch.last]))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        width, size = config.width, config.head_size
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (config.heads + 2 * config.kv_heads) * size, bias=False)
        self.out = nn.Linear(config.heads * size, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(
        self, x: Tensor, batch: Batch, turn: tuple[Tensor, Tensor], kv_cache: Tensor, mask: Tensor
    ) -> Tensor:
        x = x + self.out(self._attend(self.before_attention(x), batch, turn, kv_cache, mask))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)

    def _attend(
        self, x: Tensor, batch: Batch, turn: tuple[Tensor, Tensor], kv_cache: Tensor, mask: Tensor
    ) -> Tensor:
        c = self.config
        qkv = self.qkv(x).view(len(x), -1, c.head_size)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        block, place = batch.slots[self.window]
        kv_cache[block, 0, place] = _turned(k, turn)
        kv_cache[block, 1, place] = v
        table = batch.tables[self.window]
        known = kv_cache[table].transpose(1, 2).flatten(2, 3)  # sequences, 2, tokens, heads, size
        keys, values = (known[:, side].transpose(1, 2) for side in (0, 1))
        queries = q.new_zeros(*batch.shape, c.heads, c.head_size)
        queries[batch.rows, batch.columns] = _turned(q, turn)
        attended = functional.scaled_dot_product_attention(
            queries.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        )
        return attended.transpose(1, 2)[batch.rows, batch.columns].flatten(1)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _mask(batch: Batch, window: int | None, block_tokens: int) -> Tensor:
    """What each token attends to: (sequences, 1, most tokens, tokens of the table)."""
    known = torch.arange(batch.tables[window].shape[1] * block_tokens, device=batch.tokens.device)
    asking = known.new_zeros(batch.shape)
    asking[batch.rows, batch.columns] = batch.positions
    distance = asking[:, :, None] - known
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return mask[:, None]
