"""A model with the tensors of docs/serving_llm.md that answers what the request says. Triton's stub runs this file.

The script is the value of `script` in the sampling parameter `structured_outputs`: a list of steps, each with some of
`text` (a list, one for each answer), `reason` (as many), `logprobs`, `sleep_s`, `error`. Without a script the answer is
a JSON object with the inputs that came.
"""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
NAMES = ("input_ids", "sampling_parameters", "stream", "priority", "client", "cache_salt", "deadline_ms")


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            inputs = {name: value(request, name) for name in NAMES}
            threading.Thread(target=answer, args=(request.get_response_sender(), inputs)).start()


def value(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    if tensor is None:
        return None
    found = [v.decode() if isinstance(v, bytes) else v for v in tensor.as_numpy().tolist()]
    return found if name == "input_ids" else found[0]


def answer(sender, inputs):
    sampling = json.loads(inputs["sampling_parameters"])
    default = [{"text": [json.dumps(inputs)], "reason": ["stop"]}]
    steps = (sampling.get("structured_outputs") or {}).get("script", default)
    if not inputs["stream"]:
        steps = whole(steps)
    for step in steps:
        time.sleep(step.get("sleep_s", 0))
        if "error" in step:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(step["error"])), flags=FINAL)
            return
        outputs = {
            "text_output": np.array(step["text"], dtype=object),
            "finish_reason": np.array(step["reason"], dtype=object),
            "num_input_tokens": np.full(len(step["text"]), len(inputs["input_ids"]), np.uint32),
            "num_output_tokens": np.ones(len(step["text"]), np.uint32),
            "num_cached_tokens": np.full(len(step["text"]), 3, np.uint32),
        }
        if "logprobs" in sampling:
            entries = step.get("logprobs", [[]] * len(step["text"]))
            outputs["logprobs"] = np.array([json.dumps(entry) for entry in entries], dtype=object)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()]))
    sender.send(flags=FINAL)


def whole(steps):
    """Returns the steps of a stream as the one of a whole answer."""
    if any("error" in step for step in steps):
        return [step for step in steps if "error" in step]
    answers = range(len(steps[0]["text"]))
    joined = ["".join(step["text"][i] for step in steps) for i in answers]
    found = {"text": joined, "reason": steps[-1]["reason"], "sleep_s": sum(step.get("sleep_s", 0) for step in steps)}
    if "logprobs" in steps[0]:
        found["logprobs"] = [[entry for step in steps for entry in step["logprobs"][i]] for i in answers]
    return [found]
