"""Models over sequences: recurrent ones, attention in its many forms, experts, caches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, floats, ids, padding

DIMS = ("batch: {max: 4}", "length: {min: 1, opt: 6, max: 12}")
FRAMES = floats("x", "batch, length, 8")


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.lstm(x)


class LastStep(Lstm):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.lstm(x)[0][:, -1]


class BiLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 6, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


class PlainRnn(nn.Module):
    """Two layers of tanh, and without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 6, 2, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class StatefulLstm(nn.Module):
    """The state comes in and goes out: how a stream is served step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
        return y, h.transpose(0, 1), c.transpose(0, 1)


class PackedLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]


class LstmCellLoop(nn.Module):
    """A Python loop over a fixed number of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 6)
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
        return h


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        hidden = mask == 0
        memory = self.encoder(self.embed(ids), src_key_padding_mask=hidden)
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        y = self.decoder(
            self.embed(target), memory, tgt_mask=causal, memory_key_padding_mask=hidden, tgt_is_causal=True
        )
        return y @ self.embed.weight.T


class StackedEncoder(nn.Module):
    """torch's own encoder, whose fast path in eval mode has no ONNX form and makes nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        y = self.encoder(self.embed(ids), src_key_padding_mask=mask == 0)
        return (y * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.attention(x, x, x, key_padding_mask=mask == 0)


class Experts(nn.Module):
    """Top-2 of four experts, each computed for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        gate = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        return sum(gate[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class SparseExperts(Experts):
    """As most people write it: each expert gets the tokens that chose it, found with torch.where."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == i)
            y.index_add_(0, rows, expert(flat[rows]) * weights[rows, slot, None])
        return y.reshape(x.shape)


def rotate(x: Tensor, position: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = position[..., None].float() * (10000 ** (-torch.arange(half) / half))
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class GroupedQuery(nn.Module):
    """RoPE, four query heads on two key heads, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.norm = nn.Linear(8, 16), nn.Linear(8, 16), nn.RMSNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = self.norm(x)
        position = torch.arange(length).expand(batch, -1)
        q = rotate(self.q(x).view(batch, length, 4, 4).transpose(1, 2), position)
        k, v = self.kv(x).view(batch, length, 2, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, rotate(k, position), v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


class KvCache(nn.Module):
    """One decoder step: the past comes in, the longer past goes out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, past_k: Tensor, past_v: Tensor) -> dict[str, Tensor]:
        q, k, v = self.qkv(x).view(x.shape[0], -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        y = F.scaled_dot_product_attention(q, k, v)
        return {"y": y.transpose(1, 2).flatten(2), "present_k": k, "present_v": v}


class StaticKvCache(nn.Module):
    """A cache in a buffer that forward writes into: state that a served file cannot have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(5, 16, 8))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.cache[: x.shape[0], position[0]] = x
        return self.cache.sum(1)[: x.shape[0]]


class MaskedWithInfinity(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = x @ x.transpose(1, 2)
        scores = torch.where(mask[:, None, :] != 0, scores, float("-inf"))
        return scores.softmax(-1) @ x


class IntegerMask(nn.Module):
    """`1.0 - mask` on integers, as BERT's code had it for years."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        bias = (1.0 - mask[:, None, :]) * -10000.0
        return (x @ x.transpose(1, 2) + bias).softmax(-1) @ x


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bld,hde->bhle", x, self.weight)


class RelativePosition(nn.Module):
    """T5's buckets: a table looked up by clamped distances."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])
        bucket = (position[None] - position[:, None]).clamp(-4, 4) + 4
        return (x @ x.transpose(1, 2))[:, None] + self.table(bucket).permute(2, 0, 1)


STATE = ("{name: y}", "{name: h_out}", "{name: c_out}")
CACHE = floats("past_k", "batch, 2, past, 4"), floats("past_v", "batch, 2, past, 4")
ENTRIES = (
    Entry(
        Lstm,
        (FRAMES,),
        STATE,
        DIMS,
        refused=(
            "'h_out'",
            "its first axis is not the batch",
            "return [batch, ...]",
        ),
    ),
    Entry(LastStep, (FRAMES,), dims=DIMS),
    Entry(BiLstm, (FRAMES,), dims=DIMS),
    Entry(Gru, (FRAMES,), dims=DIMS),
    Entry(PlainRnn, (FRAMES,), dims=DIMS),
    Entry(StatefulLstm, (FRAMES, floats("h", "batch, 1, 6"), floats("c", "batch, 1, 6")), STATE, DIMS),
    Entry(
        PackedLstm,
        (FRAMES, ids("lengths", "batch", 1, 1)),
        dims=DIMS,
        refused=(
            "pack_padded_sequence",
            "values of the lengths",
            "sequence.py:",
            "mask its result",
        ),
    ),
    Entry(LstmCellLoop, (floats("x", "batch, 4, 8"),)),
    Entry(EncoderDecoder, (ids(), padding(), ids("target", "batch, steps")), dims=(*DIMS, "steps: {max: 7}")),
    Entry(StackedEncoder, (ids(), padding()), dims=DIMS),
    Entry(MultiheadAttention, (FRAMES, padding()), ("{name: y}", "{name: weights}"), DIMS),
    Entry(Experts, (FRAMES,), dims=DIMS),
    Entry(SparseExperts, (FRAMES,), dims=DIMS),
    Entry(GroupedQuery, (FRAMES,), dims=DIMS),
    Entry(
        KvCache,
        (floats("x", "batch, 1, 8"), *CACHE),
        ("{name: y}", "{name: present_k}", "{name: present_v}"),
        ("batch: {max: 4}", "past: {max: 9}"),
    ),
    Entry(
        StaticKvCache,
        (floats("x", "2, 8"), ids("position", "1", 15)),
        dims=(),
        refused=(
            "differently the second time",
            "changes its state: cache",
            "pass state in as an input",
        ),
    ),
    Entry(MaskedWithInfinity, (FRAMES, padding()), dims=DIMS),
    Entry(IntegerMask, (FRAMES, padding()), dims=DIMS),
    Entry(Einsum, (FRAMES,), dims=DIMS),
    Entry(RelativePosition, (FRAMES,), dims=DIMS),
)
