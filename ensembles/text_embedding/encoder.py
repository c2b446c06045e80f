"""all-MiniLM-L6-v2 as a plain PyTorch module: BERT encoder, mean pooling over the mask, L2 normalisation.

The parameter names are those of the published weight file, so that it loads strictly.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# config.json of the published model.
VOCABULARY_SIZE = 30522
HIDDEN_SIZE = 384
NUM_LAYERS = 6
NUM_HEADS = 12
INTERMEDIATE_SIZE = 1536
MAX_POSITIONS = 512
LAYER_NORM_EPS = 1e-12


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY_SIZE, HIDDEN_SIZE)
        self.position_embeddings = nn.Embedding(MAX_POSITIONS, HIDDEN_SIZE)
        self.token_type_embeddings = nn.Embedding(2, HIDDEN_SIZE)
        self.LayerNorm = nn.LayerNorm(HIDDEN_SIZE, eps=LAYER_NORM_EPS)

    def forward(self, input_ids: Tensor) -> Tensor:
        # One segment only: every token has type 0.
        positions = self.position_embeddings.weight[: input_ids.shape[1]]
        return self.LayerNorm(self.word_embeddings(input_ids) + positions + self.token_type_embeddings.weight[0])


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.key = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)
        self.value = nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = hidden.shape

        def heads(x: Tensor) -> Tensor:  # [batch, length, hidden] -> [batch, heads, length, head_dim]
            return x.view(batch, length, NUM_HEADS, HIDDEN_SIZE // NUM_HEADS).transpose(1, 2)

        attended = F.scaled_dot_product_attention(
            heads(self.query(hidden)), heads(self.key(hidden)), heads(self.value(hidden)), attn_mask=mask
        )
        return attended.transpose(1, 2).reshape(batch, length, HIDDEN_SIZE)


class Projection(nn.Module):
    """A linear layer whose result is added to the residual and normalised."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(size, HIDDEN_SIZE)
        self.LayerNorm = nn.LayerNorm(HIDDEN_SIZE, eps=LAYER_NORM_EPS)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(), "output": Projection(HIDDEN_SIZE)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(HIDDEN_SIZE, INTERMEDIATE_SIZE)})
        self.output = Projection(INTERMEDIATE_SIZE)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        hidden = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        return self.output(F.gelu(self.intermediate["dense"](hidden)), hidden)


class SentenceEncoder(nn.Module):
    """Token ids to one unit vector per row."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(NUM_LAYERS))})

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Embeds token ids.

        Args:
            input_ids: [batch, length], int64.
            attention_mask: [batch, length], int64, 1 for tokens and 0 for padding.

        Returns:
            [batch, 384], float32, rows of length 1.
        """
        hidden = self.embeddings(input_ids)
        weights = attention_mask.to(hidden.dtype)
        # 0 where attended, the smallest number where not.
        mask = (1.0 - weights)[:, None, None, :] * torch.finfo(hidden.dtype).min
        for layer in self.encoder["layer"]:
            hidden = layer(hidden, mask)
        weights = weights[:, :, None]
        pooled = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return F.normalize(pooled, dim=1)


def build_encoder() -> nn.Module:
    """The factory that `encoder.yaml` names; the weights are loaded by the compiler."""
    return SentenceEncoder()
