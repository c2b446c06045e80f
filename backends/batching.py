"""What our Python-based backends share: requests in, merged runs, one response per request.

Copied beside each backend's model.py, since Triton's stub imports from that folder alone.
"""

import numpy as np
import triton_python_backend_utils as pb_utils


def answer(requests, inputs, outputs, batched, run, strings=frozenset()):
    """Runs requests in as few calls as their shapes allow.

    Args:
        requests: what Triton's scheduler handed over.
        inputs, outputs: names of the model's tensors.
        batched: whether requests may be merged along the first axis.
        run: feed (arrays by input name) -> list of output arrays, in the order of `outputs`.
        strings: inputs that the model takes as text; Triton hands over bytes.

    Returns:
        One response per request, in order. A request that fails does not fail its batch mates.
    """
    feeds = [{name: _array(request, name, name in strings) for name in inputs} for request in requests]
    responses = [None] * len(requests)
    for group in _groups(feeds, inputs, batched):
        try:
            results = _run_merged([feeds[i] for i in group], inputs, run)
        except Exception as error:
            # One bad request (an id out of range, say) must not fail the others that were merged with it.
            results = [error] if len(group) == 1 else [_run_alone(feeds[i], inputs, run) for i in group]
        for index, result in zip(group, results, strict=True):
            responses[index] = _response(requests[index], outputs, result)
    return responses


def parameters_of(config):
    """Returns config.pbtxt's `parameters` as plain text by key."""
    return {key: value["string_value"] for key, value in config.get("parameters", {}).items()}


def _groups(feeds, inputs, batched):
    """Returns lists of request indices that can run as one batch: equal shapes but for the first axis."""
    if not batched:
        return [[i] for i in range(len(feeds))]
    groups = {}
    for index, feed in enumerate(feeds):
        groups.setdefault(tuple(feed[name].shape[1:] for name in inputs), []).append(index)
    return list(groups.values())


def _run_merged(feeds, inputs, run):
    """Runs requests as one batch; returns one list of output arrays per request."""
    if len(feeds) == 1:
        return [run(feeds[0])]
    merged = {name: np.concatenate([feed[name] for feed in feeds]) for name in inputs}
    ends = np.cumsum([feed[inputs[0]].shape[0] for feed in feeds])[:-1]
    columns = [np.split(array, ends) for array in run(merged)]
    return [list(row) for row in zip(*columns, strict=True)]


def _run_alone(feed, inputs, run):
    try:
        return _run_merged([feed], inputs, run)[0]
    except Exception as error:
        return error


def _array(request, name, is_text):
    array = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
    if is_text:
        array = np.array([s.decode("utf-8") for s in array.flat], dtype=object).reshape(array.shape)
    return array


def _response(request, outputs, result):
    if isinstance(result, Exception):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(_one_line(result)))
    wanted = set(request.requested_output_names())
    tensors = [
        pb_utils.Tensor(name, np.ascontiguousarray(array))
        for name, array in zip(outputs, result, strict=True)
        if name in wanted
    ]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _one_line(error):
    """Returns the message without the runtime's source paths."""
    text = " ".join(str(error).split())
    return text.rsplit("Status Message: ", 1)[-1][-500:]
