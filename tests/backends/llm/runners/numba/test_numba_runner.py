"""NumbaRunner: every architecture near the plain decoder, and a token's logits the same bits however it is computed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.loaders import load_model
from backends.llm.loaders.base import DenseWeight, LoadedModel
from backends.llm.models.weights import rows_of_bytes, values
from backends.llm.runners.cpu import numba_lacks, open_cpu_runner
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.numba import runner as module
from backends.llm.runners.numba.runner import NumbaRunner
from backends.llm.runners.torch_runner import TorchRunner
from backends.llm.tokenizers import load_tokenizer
from compiler.errors import EnvironmentLacks, UsageError
from tests.backends.llm.runners.tiny_models import MODELS, VOCAB, build

OPTIONS = CpuOptions(kv_cache_bytes=1 << 24, num_threads=2)


def part(runner, ids, start, stop, table, num_logits=None, name="a"):
    blocks = tuple(BlockId(b) for b in table[: -(-stop // runner.block_size)])
    return ScheduledRequest(
        RequestId(name), ids[start:stop], start, blocks, stop - start if num_logits is None else num_logits
    )


def logits(runner, *parts):
    return runner.execute(SchedulerOutput(parts)).logits.copy()


def with_byte_weights(model: LoadedModel) -> LoadedModel:
    """Returns the model whose matrices have the values that the bytes stand for."""
    weights = {}
    for name in model.weights:
        found = values(model.weights[name])
        if found.ndim == 2:
            found = values(rows_of_bytes(model.weights[name]))
        weights[name] = DenseWeight(found)
    return replace(model, weights=weights)


def tiny(name: str, **changes) -> LoadedModel:
    model = build(name)[1]
    return replace(model, config=replace(model.config, **changes))


@pytest.mark.parametrize("name", [*MODELS, "capped"])
def test_every_architecture_is_near_the_plain_decoder(name):
    """What is left is the rounding of activations to bytes, and of keys and values to bfloat16."""
    model = tiny("llama", attention_softcap=2.0) if name == "capped" else build(name)[1]
    ids = np.random.default_rng(5).integers(0, VOCAB, 100).tolist()
    plain = TorchRunner(with_byte_weights(model), num_blocks=10, block_size=16)
    wanted = logits(plain, part(plain, ids, 0, 100, list(range(10))))
    runner = NumbaRunner(model, OPTIONS)
    found = logits(runner, part(runner, ids, 0, 100, [9, 2, 5, 1, 7, 3, 8]))
    runner.close()
    error = ((found - wanted) ** 2).sum(1) / ((wanted - wanted.mean(1, keepdims=True)) ** 2).sum(1)
    assert error.mean() < 4e-3, error
    assert error.max() < 4e-2


@pytest.fixture(scope="module")
def long_context():
    """A model with windowed layers and others, and prompts beyond a span of 256 tokens and a step of 512 rows."""
    runner = NumbaRunner(tiny("gemma3", max_position_embeddings=2048), OPTIONS)
    yield runner
    runner.close()


def test_chunks_decodes_batch_mates_and_spans_change_no_bit(long_context, monkeypatch):
    runner = long_context
    ids, others = np.random.default_rng(5).integers(0, VOCAB, (2, 700)).tolist()
    table, more = list(range(44)), list(range(50, 94))
    whole = logits(runner, part(runner, ids, 0, 700, table))  # two parts of a step

    chunked = [logits(runner, part(runner, ids, at, min(at + 97, 700), table)) for at in range(0, 700, 97)]
    np.testing.assert_array_equal(np.concatenate(chunked), whole)

    logits(runner, part(runner, others, 0, 520, more))
    mixed = [
        logits(
            runner,
            part(runner, others, 520 + at, 521 + at, more, name="b"),
            part(runner, ids, 10 * at, 10 * at + 10, table),
        )[1:]
        for at in range(70)
    ]
    np.testing.assert_array_equal(np.concatenate(mixed), whole)

    alone = np.concatenate([logits(runner, part(runner, ids, at, at + 1, table)) for at in range(600, 700)])
    np.testing.assert_array_equal(alone, whole[600:])
    monkeypatch.setattr(module, "MAX_PARTS", 0)  # the spans of a token one after the other
    alone = np.concatenate([logits(runner, part(runner, ids, at, at + 1, table)) for at in range(600, 700)])
    np.testing.assert_array_equal(alone, whole[600:])


def test_asked_for_fewer_logits_the_last_layer_gives_the_same_bits(long_context):
    runner = long_context
    ids, others = np.random.default_rng(6).integers(0, VOCAB, (2, 400)).tolist()
    table, more = list(range(25)), list(range(30, 55))
    whole = logits(runner, part(runner, ids, 0, 400, table))
    assert logits(runner, part(runner, ids, 0, 400, table, 0)).shape == (0, VOCAB)
    logits(runner, part(runner, others, 0, 300, more, 0))
    some = logits(
        runner,
        part(runner, ids, 0, 130, table, 7),
        part(runner, others, 300, 301, more, 1, "b"),
        part(runner, others, 0, 12, [60], 0, "c"),
    )
    np.testing.assert_array_equal(some[:7], whole[123:130])
    np.testing.assert_array_equal(some[7:], logits(runner, part(runner, others, 300, 301, more)))
    rest = logits(runner, part(runner, ids, 130, 400, table, 200))
    np.testing.assert_array_equal(rest, whole[200:])


def test_what_others_left_in_a_block_is_not_seen(long_context):
    runner = long_context
    ids = np.random.default_rng(7).integers(0, VOCAB, 300).tolist()
    clean = logits(runner, part(runner, ids, 0, 300, list(range(19))))
    for memory in runner._cache:
        memory.view(np.int16)[:] = 0x7FC0  # no number
    found = [logits(runner, part(runner, ids, at, at + 20, list(range(19)))) for at in range(0, 300, 20)]
    np.testing.assert_array_equal(np.concatenate(found), clean)


@pytest.mark.parametrize("num_threads", [1, 3, 8])
def test_any_number_of_threads_gives_the_same_bits_and_ends(num_threads):
    model = build("qwen3")[1]
    ids = np.random.default_rng(8).integers(0, VOCAB, 90).tolist()
    others = threading.enumerate()
    first, second = NumbaRunner(model, OPTIONS), NumbaRunner(model, replace(OPTIONS, num_threads=num_threads))
    mine = [thread for thread in threading.enumerate() if thread not in others]
    assert len(mine) == 1 + num_threads - 1
    for at in range(0, 90, 9):  # in turn, as a draft model and the one that verifies
        one = logits(first, part(first, ids, at, at + 9, list(range(6))))
        np.testing.assert_array_equal(one, logits(second, part(second, ids, at, at + 9, list(range(6)))))
    first.close()
    second.close()
    assert not [thread for thread in mine if thread.is_alive()]


def test_what_it_cannot_do_is_said_and_left_to_openvino(monkeypatch):
    model = build("llama")[1]
    for options, words in (
        ({"exact": True}, "exact is true"),
        ({"weights": "bf16"}, "weights is bf16: it has u8_rows alone"),
        ({"kv_cache_precision": "u8"}, "its cache is in bf16"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            open_cpu_runner("numba", model, replace(OPTIONS, **options))
        assert caught.value.hint == "use the openvino runner"
        runner = open_cpu_runner("auto", model, replace(OPTIONS, **options))
        assert runner.name == "openvino"
        runner.close()
    assert "head_dim is 24 and hidden_size 64: no multiples" in numba_lacks(replace(model.config, head_dim=24), OPTIONS)
    assert open_cpu_runner("auto", model, OPTIONS).name == "numba"
    with pytest.raises(UsageError, match="kv_cache_bytes is 1000; one block takes 12288"):
        NumbaRunner(model, replace(OPTIONS, kv_cache_bytes=1000))
    with monkeypatch.context() as patched:
        patched.setattr("numba.core.config.DISABLE_JIT", 1)
        assert numba_lacks(model.config, OPTIONS) == "NUMBA_DISABLE_JIT is set"
    with monkeypatch.context() as patched:
        patched.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UsageError, match="numba is not installed"):
            open_cpu_runner("numba", model, OPTIONS)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "Linux on aarch64" in numba_lacks(model.config, OPTIONS)
    monkeypatch.setitem(sys.modules, "backends.llm.runners.openvino", None)
    with pytest.raises(EnvironmentLacks, match="numba runner cannot take its place: this is Linux on aarch64"):
        open_cpu_runner("auto", model, OPTIONS)


def test_without_vnni_a_model_is_computed_by_openvino():
    code = (
        "from backends.llm.runners.cpu import open_cpu_runner\n"
        "from backends.llm.runners.cpu_options import CpuOptions\n"
        "from tests.backends.llm.runners.tiny_models import build\n"
        "print(open_cpu_runner('auto', build('llama')[1], CpuOptions(kv_cache_bytes=1 << 22)).name)\n"
    )
    settings = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "openvino\n"


def test_smollm2_is_as_near_as_openvinos_integer_products_are(smollm2):
    model, text = load_model(smollm2), (Path(__file__).parents[5] / "docs" / "llm.md").read_text(encoding="utf-8")
    ids = load_tokenizer(smollm2).encode(text)[:200]
    options = replace(OPTIONS, kv_cache_bytes=1 << 26)
    found = {}
    for kind, changes in (("exact", {"exact": True}), ("openvino", {}), ("numba", {})):
        runner = open_cpu_runner("numba" if kind == "numba" else "openvino", model, replace(options, **changes))
        found[kind] = logits(runner, part(runner, ids, 0, 200, list(range(13))))
        runner.close()
    wanted = found["exact"]
    spread = ((wanted - wanted.mean(1, keepdims=True)) ** 2).sum(1)
    errors = {kind: (((found[kind] - wanted) ** 2).sum(1) / spread).mean() for kind in ("openvino", "numba")}
    assert errors["numba"] < 1.3 * errors["openvino"], errors
    assert errors["numba"] < 2e-2


def test_machine_code_is_kept_for_these_kernels_alone(tmp_path):
    code = (
        "from backends.llm.runners.numba.runner import NumbaRunner\n"
        "from backends.llm.runners.cpu_options import CpuOptions\n"
        "from tests.backends.llm.runners.tiny_models import build\n"
        "from numba.core import config\n"
        "NumbaRunner(build('llama')[1], CpuOptions(kv_cache_bytes=1 << 22, num_threads=1)).close()\n"
        "from backends.llm.runners.numba.step import take_part\n"
        "print(repr(config.CACHE_DIR), sum(take_part.stats.cache_hits.values()))\n"
    )

    def run(**settings):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert run(MODELKILN_CACHE_DIR=str(tmp_path)) == "'' 0"
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("kernels-")
    assert run(MODELKILN_CACHE_DIR=str(tmp_path)) == "'' 1"
    assert not list(Path(module.__file__).parent.rglob("*.nbi"))  # the server would take them for a new version
    (tmp_path / "file").write_text("")
    assert run(MODELKILN_CACHE_DIR=str(tmp_path / "file")) == "'' 0"  # no place: in a temporary folder


def test_threads_where_nobody_says_how_many(monkeypatch):
    monkeypatch.setattr(module, "available_cores", lambda: 64)
    assert [module._threads_for(size << 20) for size in (1, 8, 130, 8000)] == [1, 1, 16, 64]


def test_threads_end_with_a_runner_that_nobody_closed():
    others = threading.enumerate()
    runner = NumbaRunner(build("llama")[1], OPTIONS)
    (helper,) = [thread for thread in threading.enumerate() if thread not in others]
    del runner
    gc.collect()
    helper.join(10)
    assert not helper.is_alive()


def test_after_a_fork_the_error_says_so():
    runner = NumbaRunner(build("llama")[1], OPTIONS)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def child():
        try:
            logits(runner, part(runner, [1, 2], 0, 2, [0]))
        except RuntimeError as error:
            sender.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    assert receiver.poll(30)
    assert "do not survive a fork: load the model in the new process" in receiver.recv()
    process.join(30)
    assert logits(runner, part(runner, [1, 2], 0, 2, [0])).shape == (2, VOCAB)
    runner.close()
