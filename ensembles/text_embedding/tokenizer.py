"""Text to token ids, as a Triton Python model: the `tokenizers` library on the model's own tokenizer.json.

Lengths are padded up to a multiple, so that requests of about the same length have the same shape and
the encoder's dynamic batcher can merge them.
"""

import json
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizers import Tokenizer


class TritonPythonModel:
    """TEXT [batch, 1] bytes in; input_ids and attention_mask [batch, length] int64 out."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        folder = Path(args["model_repository"], args["model_version"])
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(max_length=int(parameters["max_length"]))
        self.tokenizer.enable_padding(pad_to_multiple_of=int(parameters["pad_to_multiple_of"]))

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        try:
            texts = [row.decode("utf-8") for row in rows.reshape(-1)]
        except UnicodeDecodeError as error:
            message = f"text is not valid UTF-8: {error.reason} at byte {error.start}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))
        encodings = self.tokenizer.encode_batch(texts)
        ids = np.array([e.ids for e in encodings], dtype=np.int64)
        mask = np.array([e.attention_mask for e in encodings], dtype=np.int64)
        return pb_utils.InferenceResponse(
            output_tensors=[pb_utils.Tensor("input_ids", ids), pb_utils.Tensor("attention_mask", mask)]
        )
