"""FlashInfer's attention: what it is told, against its documentation; and itself on a GPU where it is installed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest
from backends.llm.runners.step_inputs import flatten
from compiler.errors import EnvironmentLacks, UsageError
from tests.backends.llm.runners.tiny_models import VOCAB, build

torch = pytest.importorskip("torch")

from backends.llm.models.decoder import Decoder  # noqa: E402
from backends.llm.runners.flashinfer_attention import FlashInferAttention, Pages, is_installed, new_wrapper  # noqa: E402
from backends.llm.runners.step_attention import PagedCache, PlainAttention, StepAttention  # noqa: E402
from backends.llm.runners.torch_runner import TorchOptions, choose_attention  # noqa: E402

BLOCK = 16


class Documented:
    """BatchPrefillWithPagedKVCacheWrapper of flashinfer-python 0.7.4 as its documentation says, for "NHD".

    Its parameters have the names and the order of the real ones.
    """

    def __init__(self, device: Any) -> None:
        self.calls = 0

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: Any,
        kv_data_type: Any,
    ) -> None:
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(array.dtype == torch.int32 for array in arrays) and causal
        assert q_data_type == kv_data_type
        self._queries, self._begins, self._indices, self._last_lens = (array.tolist() for array in arrays)
        self._shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._scale, self._window_left, self._cap = sm_scale, window_left, logits_soft_cap or 0.0

    def run(self, q: Any, paged_kv_cache: tuple[Any, Any]) -> Any:
        self.calls += 1
        heads, kv_heads, dim, page_size = self._shape
        assert q.shape[1:] == (heads, dim)
        assert all(cache.shape[1:] == (page_size, kv_heads, dim) for cache in paged_kv_cache)
        out = []
        for i, last in enumerate(self._last_lens):
            pages = self._indices[self._begins[i] : self._begins[i + 1]]
            assert 1 <= last <= page_size
            length = (len(pages) - 1) * page_size + last
            keys, values = (
                cache[pages].flatten(0, 1)[:length].repeat_interleave(heads // kv_heads, 1) for cache in paged_kv_cache
            )
            query = q[self._queries[i] : self._queries[i + 1]]
            scores = torch.einsum("qhd,khd->hqk", query, keys) * self._scale
            if self._cap > 0:
                scores = self._cap * torch.tanh(scores / self._cap)
            position = torch.arange(length - len(query), length)[:, None]  # causal: the last query sees the last key
            key_position = torch.arange(length)[None]
            seen = key_position <= position
            if self._window_left >= 0:
                seen &= key_position >= position - self._window_left
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
        return torch.cat(out)


def steps(ids: Sequence[Sequence[int]]) -> list[tuple[ScheduledRequest, ...]]:
    """Chunks and decodes mixed; a block that is full to the last slot, and tables longer than what is used."""
    tables = [[BlockId(b) for b in table] for table in ([6, 1, 4], [2, 7, 0])]
    first, second = ids
    return [
        (ScheduledRequest(RequestId("a"), first[:32], 0, tables[0], 32),),
        (
            ScheduledRequest(RequestId("b"), second[:5], 0, tables[1], 5),
            ScheduledRequest(RequestId("a"), first[32:33], 32, tables[0], 1),
        ),
        (
            ScheduledRequest(RequestId("a"), first[33:34], 33, tables[0], 1),
            ScheduledRequest(RequestId("b"), second[5:44], 5, tables[1], 39),
        ),
    ]


def compare(name: str, device: str, dtype: Any, make_wrapper: Any, tolerance: float, head_dim: int) -> None:
    model = build(name, head_dim)[1]
    config = model.config
    decoder = Decoder(model, device=device, dtype=dtype)
    shape = (config.num_hidden_layers, 8, BLOCK, config.num_key_value_heads, config.head_dim)
    plain, theirs = (PagedCache(*(torch.zeros(shape, device=device, dtype=dtype) for _ in "kv")) for _ in range(2))
    ways: list[StepAttention] = [PlainAttention(config, plain), FlashInferAttention(config, theirs, make_wrapper)]
    ids = np.random.default_rng(5).integers(0, VOCAB, (2, 44)).tolist()
    for requests in steps(ids):
        inputs = flatten(requests)
        arrays = (inputs.input_ids, inputs.position_ids, inputs.logits_indices)
        tensors = [torch.from_numpy(array).long().to(device) for array in arrays]
        with torch.inference_mode():
            wanted, got = (decoder(*tensors[:2], way.prepare(inputs), tensors[2]) for way in ways)
        assert wanted.std() > 0.5
        torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_what_it_is_told_gives_plain_attention(name: str) -> None:
    made: list[Documented] = []

    def make(device: Any) -> Documented:
        made.append(Documented(device))
        return made[-1]

    compare(name, "cpu", torch.float32, make, 1e-4, head_dim=32)
    # One for all steps; Gemma has layers of both kinds. Three layers, three steps.
    assert len(made) == (2 if name == "gemma3" else 1)
    assert sum(wrapper.calls for wrapper in made) == 9


def test_pages_leave_out_blocks_that_are_not_used_yet() -> None:
    requests = (
        ScheduledRequest(RequestId("a"), [1], 31, [BlockId(b) for b in (3, 5, 8)], 1),
        ScheduledRequest(RequestId("b"), [1, 2], 0, [BlockId(4)], 1),
        ScheduledRequest(RequestId("c"), [1], 32, [BlockId(b) for b in (9, 2, 6)], 1),
    )
    pages = Pages.of(flatten(requests), BLOCK)
    assert pages.begins.tolist() == [0, 2, 3, 6]
    assert pages.indices.tolist() == [3, 5, 4, 9, 2, 6]
    assert pages.last_lens.tolist() == [16, 2, 1]


def test_which_attention_auto_is() -> None:
    config = build("llama")[1].config  # heads of 32: not FlashInfer's
    wide = type(config)(**{**vars(config), "head_dim": 64})
    here = TorchOptions()
    # As on a machine with a GPU, which the options ask for when they are made.
    there = object.__new__(TorchOptions)
    for name, value in {**vars(here), "device": "cuda", "dtype": "bfloat16"}.items():
        object.__setattr__(there, name, value)
    both = {"has_flashinfer": True, "has_triton": True}
    assert choose_attention(here, wide, **both) == "plain"
    assert choose_attention(there, wide, **both) == "flashinfer"
    assert choose_attention(there, config, **both) == "kernel"
    assert choose_attention(there, wide, has_flashinfer=False, has_triton=True) == "kernel"
    assert choose_attention(there, wide, has_flashinfer=False, has_triton=False) == "plain"
    object.__setattr__(there, "attention", "flashinfer")
    with pytest.raises(EnvironmentLacks, match="that package is not installed"):
        choose_attention(there, wide, has_flashinfer=False, has_triton=True)
    with pytest.raises(UsageError, match="head_dim 32; it has kernels for float16 and bfloat16 and 64, 128, 256"):
        choose_attention(there, config, **both)


def test_it_is_not_for_a_cpu() -> None:
    with pytest.raises(UsageError, match="FlashInfer needs an NVIDIA GPU"):
        TorchOptions(attention="flashinfer")


@pytest.mark.skipif(not is_installed(), reason="flashinfer-python is not installed")
def test_the_documented_parameters_are_the_real_ones() -> None:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper as Real

    real = list(inspect.signature(Real.plan).parameters)
    ours = list(inspect.signature(Documented.plan).parameters)
    positional = ours[: ours.index("causal")]
    assert real[: len(positional)] == positional and set(ours) <= set(real)
    assert list(inspect.signature(Real.run).parameters)[:3] == ["self", "q", "paged_kv_cache"]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not is_installed(), reason="no NVIDIA GPU with FlashInfer: run tests/gpu/run.sh"
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_flashinfer_on_a_gpu_equals_plain_attention(name: str) -> None:
    compare(name, "cuda", torch.float16, new_wrapper, 0.02, head_dim=64)
