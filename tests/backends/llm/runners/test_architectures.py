"""Every architecture, in both runners, against `transformers` in float32: whole, in chunks, token by token, mixed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.loaders.base import LoadedModel
from backends.llm.runners.base import ModelRunner
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.openvino import OpenVinoRunner
from backends.llm.runners.torch_runner import TorchRunner
from tests.backends.llm.runners.tiny_models import MODELS, VOCAB, build, their_logits

LENGTH = 75  # three blocks of 32, beyond the windows of 24


def _openvino(model: LoadedModel) -> ModelRunner:
    return OpenVinoRunner(model, CpuOptions(exact=True, kv_cache_bytes=1 << 24, num_threads=2))


def _torch(model: LoadedModel) -> ModelRunner:
    return TorchRunner(model, num_blocks=40, block_size=16)


RUNNERS: dict[str, Callable[[LoadedModel], ModelRunner]] = {"openvino": _openvino, "torch": _torch}


def _part(runner: ModelRunner, ids: list[int], start: int, stop: int, table: list[int]) -> ScheduledRequest:
    blocks = tuple(BlockId(b) for b in table[: -(-stop // runner.block_size)])
    return ScheduledRequest(RequestId(str(table)), ids[start:stop], start, blocks, stop - start)


def _logits(runner: ModelRunner, *parts: ScheduledRequest) -> np.ndarray:
    return runner.execute(SchedulerOutput(parts)).logits.copy()


@pytest.mark.parametrize("kind", RUNNERS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, kind: str) -> None:
    theirs, model = build(name)
    runner = RUNNERS[kind](model)
    first, second = np.random.default_rng(3).integers(0, VOCAB, (2, LENGTH)).tolist()
    wanted = [their_logits(theirs, ids).numpy() for ids in (first, second)]
    assert np.abs(wanted[0] - wanted[1]).max() > 1

    # Whole, over blocks in no order.
    whole = _logits(runner, _part(runner, first, 0, LENGTH, [7, 2, 5, 9, 1]))
    np.testing.assert_allclose(whole, wanted[0], atol=1e-4)

    # In one step the end of a long prompt's chunk and another request's decode; the tables share nothing.
    tables = [[4, 11, 0, 8, 6], [3, 10, 12, 14, 13]]
    got: list[list[np.ndarray]] = [[], []]
    got[0].append(_logits(runner, _part(runner, first, 0, 40, tables[0])))
    for at in range(0, 35, 5):
        step = _logits(
            runner,
            _part(runner, second, 8 * at // 5, 8 * at // 5 + 8, tables[1]),
            _part(runner, first, 40 + at, 41 + at, tables[0]),
        )
        got[1].append(step[:8])
        got[0].append(step[8:])
        got[0].append(_logits(runner, _part(runner, first, 41 + at, 45 + at, tables[0])))
    np.testing.assert_allclose(np.concatenate(got[0]), wanted[0], atol=1e-4)
    np.testing.assert_allclose(np.concatenate(got[1]), wanted[1][:56], atol=1e-4)
    runner.close()


@pytest.mark.parametrize("kind", RUNNERS)
def test_only_the_rows_asked_for_come_back(kind: str) -> None:
    _, model = build("llama")
    runner = RUNNERS[kind](model)
    ids = list(range(20))
    full = _part(runner, ids, 0, 20, [0, 1])
    alone = _logits(runner, full)
    few = _logits(runner, full._replace(num_logits=2), _part(runner, ids, 0, 20, [3, 2])._replace(num_logits=1))
    np.testing.assert_allclose(few, alone[[18, 19, 19]], atol=1e-5)
    assert _logits(runner, full._replace(num_logits=0)).shape == (0, VOCAB)
    assert _logits(runner).shape == (0, VOCAB)
