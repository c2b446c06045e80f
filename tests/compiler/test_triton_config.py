from __future__ import annotations

import pytest

from compiler.errors import ModelRefused, RepositoryError
from compiler.spec import Serving
from compiler.targets.registry import ArtifactTensor
from compiler.triton_config import (
    Step,
    TensorConfig,
    add_serving,
    base_config,
    config_from_text,
    ensemble_config,
    tensor_config,
    text_from_config,
)

X = TensorConfig("x", "TYPE_FP32", (-1, 3))


def test_c02_the_batch_axis_is_dropped():
    assert tensor_config(ArtifactTensor("x", 1, ("batch", 456, "width", 3)), True).dims == (456, -1, 3)
    assert tensor_config(ArtifactTensor("x", 1, (1, 3, 8, 8)), False).dims == (1, 3, 8, 8)


def test_c01_a_fixed_first_axis_cannot_be_batched():
    with pytest.raises(ModelRefused, match=r"'x' starts with \[1\] in the compiled file"):
        tensor_config(ArtifactTensor("x", 1, (1, 3, 8, 8)), True)


def test_c20_a_type_that_triton_lacks_is_refused():
    with pytest.raises(ModelRefused, match="ONNX element type 14"):
        tensor_config(ArtifactTensor("x", 14, ("batch", 3)), True)  # complex64


def test_c22_text_is_parsed_back_to_the_same_message():
    config = base_config("m", "onnxruntime", 8, [X], [X])
    add_serving(config, Serving(max_queue_delay_us=100, instances=2, threads=3), {"intra_op_thread_count": "3"})
    text = text_from_config(config)
    assert config_from_text(text, "config.pbtxt") == config
    assert 'key: "intra_op_thread_count"' in text and "max_queue_delay_microseconds: 100" in text


def test_c07_no_preferred_batch_size_is_written():
    config = base_config("m", "onnxruntime", 8, [X], [X])
    add_serving(config, Serving(), {})
    assert config.HasField("dynamic_batching")
    assert "preferred_batch_size" not in text_from_config(config)


def test_c05_max_batch_size_is_always_written():
    assert "max_batch_size: 0" in text_from_config(base_config("m", "onnxruntime", 0, [X], [X]))
    assert "max_batch_size: 1" in text_from_config(base_config("m", "onnxruntime", 1, [X], [X]))


def test_without_batching_there_is_no_dynamic_batcher():
    config = base_config("m", "onnxruntime", 0, [X], [X])
    add_serving(config, Serving(max_queue_delay_us=5), {})
    assert not config.HasField("dynamic_batching")


@pytest.mark.parametrize("name", ['x" max_batch_size: 999 #', "a\nb", "\\", "é", "'; }"])
def test_i10_text_in_a_name_stays_text(name):
    config = base_config("m", "onnxruntime", 4, [TensorConfig(name, "TYPE_FP32", (1,))], [X])
    back = config_from_text(text_from_config(config), "config.pbtxt")
    assert back.input[0].name == name and back.max_batch_size == 4


def test_d12_every_step_of_an_ensemble_has_a_version():
    config = ensemble_config("e", 4, [X], [X], [Step("a", {"x": "x"}, {"y": "t"}), Step("b", {"x": "t"}, {"y": "x2"})])
    assert [s.model_version for s in config.ensemble_scheduling.step] == [-1, -1]
    assert text_from_config(config).count("model_version: -1") == 2
    assert not config.instance_group  # an ensemble has none, and the server refuses one


def test_c23_a_slip_in_the_text_names_line_and_column():
    with pytest.raises(RepositoryError, match=r'^config\.pbtxt:2:1 : .*no field named "max_batch"'):
        config_from_text('name: "a"\nmax_batch: 3\n', "config.pbtxt")
