"""The spec's `calibration` key: what is taken, what is refused by line, and what counts for "nothing changed"."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from compiler.calibration_spec import CalibrationSpec, calibration_files
from compiler.errors import ModelRefused, SpecError, UsageError
from compiler.pipeline import compile_model
from compiler.precision.calibration_data import calibration_code, calibration_samples
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from tests.compiler.conftest import SPEC


def spec_with(folder: Path, calibration: str, code: str = ""):
    """Returns a spec with the key, and a module `calib_<folder>` beside it that holds `code`."""
    name = f"calib_{folder.name}"
    sys.modules.pop(name, None)
    (folder / f"{name}.py").write_text("import numpy as np\n" + code)
    text = SPEC.replace("FACTORY", "any:build").lstrip() + f"calibration: {calibration}\n"
    (folder / "spec.yaml").write_text(text.replace("MODULE", name))
    return model_spec_from_file(folder / "spec.yaml")


def refused(folder: Path, calibration: str, code: str = "", kind=SpecError) -> str:
    with pytest.raises(kind) as error:
        spec = spec_with(folder, calibration, code)
        calibration_files(spec)
        calibration_samples(spec, ["x"])
    return str(error.value)


def test_a_path_alone_and_the_mapping(tmp_path):
    assert spec_with(tmp_path, "data").calibration == CalibrationSpec("data")
    full = "{data: 'my.mod:samples', files: [a.json], method: percentile, percentile: 99.9}"
    found = spec_with(tmp_path, full).calibration
    assert found == CalibrationSpec("my.mod:samples", ("a.json",), "percentile", 99.9) and found.is_function
    assert not CalibrationSpec("a/b:c").is_function


def test_what_is_wrong_is_told_with_its_line(tmp_path):
    assert "spec.yaml:9: calibration.method is 'entropy'" in refused(tmp_path, "{data: d, method: entropy}")
    assert "allowed: minmax, percentile" in refused(tmp_path, "{data: d, method: entropy}")
    assert "percentile is 10" in refused(tmp_path, "{data: d, method: percentile, percentile: 10}")
    assert "needs method: percentile" in refused(tmp_path, "{data: d, percentile: 99}")
    assert "calibration.data is a path" in refused(tmp_path, "{data: d, files: [a]}")
    assert "no .npz files in d" in refused(tmp_path, "d")
    assert "no such file: gone.json" in refused(tmp_path, "{data: 'a:b', files: [gone.json]}")
    assert "no module named 'not_there'" in refused(tmp_path, "not_there:samples")
    text = refused(tmp_path, "MODULE:sample", "def samples(): return []\n")
    assert "has no function 'sample'; it has: samples" in text


def test_a_function_that_gives_something_else_is_refused(tmp_path):
    def told(body: str, kind=UsageError) -> str:
        return refused(tmp_path, "MODULE:samples", f"def samples():\n    {body}\n", kind)

    assert "gave no sample" in told("return []")
    assert "gave more than 4096 samples" in told("while True: yield {'x': np.zeros((1, 16))}")
    assert "calibration sample 0 is a ndarray" in told("return np.zeros((1, 16))")
    assert "calibration sample 0 has 'y', which is no input" in told("yield {'x': 1, 'y': 2}")
    assert "ZeroDivisionError: division by zero (at calib_" in told("return 1 / 0", ModelRefused)


def test_a_generator_gives_samples_and_its_code_is_hashed(tmp_path):
    spec = spec_with(tmp_path, "MODULE:samples", "def samples():\n    yield {'x': np.ones((2, 16), np.float32)}\n")
    [sample] = calibration_samples(spec, ["x"])
    assert sample["x"].shape == (2, 16)
    assert f"calib_{tmp_path.name}.py" in calibration_code(spec)


def test_an_int8_build_from_a_function_notices_its_code_and_its_files(tmp_path, project):
    code = "def samples():\n    rng = np.random.default_rng({seed})\n" + (
        "    for _ in range(4):\n        yield {{'x': rng.uniform(-4, 4, (8, 16)).astype(np.float32)}}\n"
    )
    name = f"data_{tmp_path.name}"
    key = f"precision: int8\ncalibration: {{data: '{name}:samples', files: [more.json], method: percentile}}\n"
    path = project(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)

            def forward(self, x):
                return self.down(torch.relu(self.up(x)))

        def build():
            torch.manual_seed(0)
            return Model()
        """,
        SPEC + key,
    )
    module = path.parent / f"{name}.py"
    module.write_text("import numpy as np\n" + code.format(seed=0))
    (path.parent / "more.json").write_text("[]")

    def build():
        sys.modules.pop(name, None)
        return compile_model(model_spec_from_file(path), Repository(tmp_path / "repo"))

    first = build()
    assert first.built and first.published.manifest["precision"] == "int8"
    assert module.name in first.published.manifest["code"]
    assert not build().built
    (path.parent / "more.json").write_text(json.dumps([1]))
    assert build().built
    module.write_text("import numpy as np\n" + code.format(seed=1))
    assert build().built


def test_the_encoders_calibration_set_is_what_the_pipeline_would_send():
    pytest.importorskip("tokenizers")
    from ensembles.text_embedding.calibration import SENTENCES, samples

    found = list(samples())
    rows = sum(len(s["input_ids"]) for s in found)
    assert rows == len(json.loads(SENTENCES.read_text())) > 100
    for sample in found:
        ids, mask = sample["input_ids"], sample["attention_mask"]
        assert ids.dtype == mask.dtype == np.int64 and ids.shape == mask.shape
        # [CLS] first, padding last and nowhere else, one row without any.
        assert (ids[:, 0] == 101).all() and ((ids == 0) == (mask == 0)).all() and mask.all(axis=1).any()
