"""A decoupled model that speaks the tensors and errors of docs/serving_llm.md; its answers follow from the prompt.

Triton's stub runs this file. The prompt's first word says what happens:

    inputs            the answer is all inputs of the request, as JSON
    cancelled         the answer is how many answers were cancelled so far
    running           the answer is how many answers are being given
    wait MS           MS milliseconds lie between the tokens
    hold N            nothing is answered before N of these are under way
    say WORD          the tokens are "WORD0 ", "WORD1 ", ...
    fail KIND[:PARAM] a refusal of that kind, before the first token
    break N           the engine fails after N tokens
    die N             the process ends after N tokens
    cut N             the last response comes after N tokens, without a reason to finish

Anything else is answered at full speed with the tokens "w0 ", "w1 ", ... up to max_tokens.
"""

import json
import os
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

STRINGS = ("text_input", "sampling_parameters", "stop", "client", "cache_salt")


class TritonPythonModel:
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.lock = threading.Lock()
        self.barriers = {}
        self.cancelled = 0
        self.running = 0

    def execute(self, requests):
        for request in requests:
            inputs = {}
            for name in (tensor["name"] for tensor in self.config["input"]):
                tensor = pb_utils.get_input_tensor_by_name(request, name)
                if tensor is not None:
                    values = tensor.as_numpy().tolist()
                    inputs[name] = [v.decode() for v in values] if name in STRINGS else values
            inputs["timeout_us"] = request.timeout()
            threading.Thread(target=self._answer, args=(inputs, request, request.get_response_sender())).start()

    def _answer(self, inputs, request, sender):
        with self.lock:
            self.running += 1
        try:
            error = self._tokens(inputs, request, sender)
        except Exception as failure:
            error = f"[internal] {type(failure).__name__}: {failure}"
        with self.lock:
            self.running -= 1
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if error is None:
            sender.send(flags=final)
        else:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(error)))
            sender.send(flags=final)

    def _tokens(self, inputs, request, sender):
        """Sends every response but FINAL; returns the text of an error, or None."""
        prompt = inputs.get("text_input", [""])[0]
        words = [*prompt.split(), "", ""]
        sampling = json.loads(inputs.get("sampling_parameters", ["{}"])[0])
        count, answers = sampling.get("max_tokens", 16), sampling.get("n", 1)
        if words[0] == "fail":
            return f"[{words[1]}] this was asked for"
        if sampling.get("temperature", 0) < 0:
            return f"[invalid_request:temperature] temperature is {sampling['temperature']}; allowed: 0 or more"
        whole = {"inputs": json.dumps(inputs), "cancelled": str(self.cancelled), "running": str(self.running - 1)}
        if words[0] in whole:
            sender.send(self._response(inputs, [whole[words[0]]] * answers, ["stop"] * answers, 1, 1))
            return None
        if words[0] == "hold":
            with self.lock:
                barrier = self.barriers.setdefault(int(words[1]), threading.Barrier(int(words[1]), timeout=60))
            barrier.wait()
        word = words[1] if words[0] == "say" else "w"
        if not inputs.get("stream", [False])[0]:
            text = "".join(f"{word}{i} " for i in range(count))
            sender.send(self._response(inputs, [text] * answers, ["length"] * answers, count, count))
            return None
        for index in range(count):
            if words[0] == "wait":
                time.sleep(float(words[1]) / 1000)
            if request.is_cancelled():
                with self.lock:
                    self.cancelled += 1
                return None
            if words[0] == "break" and index == int(words[1]):
                return "[internal] the engine failed"
            if words[0] == "die" and index == int(words[1]):
                os._exit(1)
            if words[0] == "cut" and index == int(words[1]):
                return None
            # Answer i of n ends i tokens before the others, and is then silent.
            ends = [max(1, count - i) for i in range(answers)]
            texts = [f"{word}{index} " if index < end else "" for end in ends]
            reasons = ["length" if index >= end - 1 else "None" for end in ends]
            sender.send(self._response(inputs, texts, reasons, index + 1, 1))
        return None

    def _response(self, inputs, texts, reasons, produced, new):
        def wanted(name):
            return inputs.get(f"return_{name}", [False])[0]

        answers = len(texts)
        outputs = [pb_utils.Tensor("text_output", np.array(texts, dtype=object))]
        if wanted("finish_reason"):
            outputs.append(pb_utils.Tensor("finish_reason", np.array(reasons, dtype=object)))
        prompt_tokens = len(inputs.get("input_ids", inputs.get("text_input", [""])[0].split()))
        numbers = {"num_input_tokens": prompt_tokens, "num_output_tokens": new, "num_cached_tokens": 0}
        for name, value in numbers.items():
            if wanted(name):
                outputs.append(pb_utils.Tensor(name, np.full(answers, value, np.uint32)))
        if wanted("cumulative_logprob"):
            outputs.append(pb_utils.Tensor("cumulative_logprob", np.full(answers, -0.5 * produced, np.float32)))
        if wanted("token_ids"):
            outputs.append(pb_utils.Tensor("token_ids", np.array([produced - 1], np.int32)))
        if wanted("logprobs"):
            entry = {"logprob": -0.5, "rank": 1, "decoded_token": texts[0], "bytes": list(texts[0].encode())}
            logprobs = json.dumps([{str(produced - 1): entry}])
            outputs.append(pb_utils.Tensor("logprobs", np.array([logprobs] * answers, dtype=object)))
        return pb_utils.InferenceResponse(outputs)
