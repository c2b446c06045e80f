"""DecoderConfig: what differs between Llama, Mistral, SmolLM, Qwen2, Qwen3 and Gemma 3, as data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """A change of the rotary frequencies for long contexts.

    Attributes:
        kind: "linear", "llama3", "yarn", "dynamic" or "divisors".
        factor: how many times the context grew.
        low_freq_factor, high_freq_factor: of "llama3"; of "yarn" they are its beta_slow and beta_fast.
        original_max_position_embeddings: of "llama3" and "yarn".
        attention_factor: what "yarn" multiplies cosine and sine with; None where it follows from the factor.
        divisors: [head_dim / 2] what "divisors" divides each frequency by: how GGUF files carry "llama3".
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer.

    Attributes:
        architecture: "llama", "mistral", "qwen2", "qwen3" or "gemma3".
        head_dim: explicit, since hidden_size / num_attention_heads is wrong for several models.
        sliding_window: tokens that a windowed layer sees, None where there is no such layer.
        windowed_layers: for each layer whether it is windowed.
        rope_theta, rope_scaling: of layers that see everything.
        local_rope_theta: of windowed layers, where it differs (Gemma 3).
        query_scale: what scores are multiplied with: head_dim ** -0.5 unless the model says otherwise.
        hidden_act: "silu" or "gelu_tanh".
        qk_norm: RMSNorm of each head's query and key before the rotation (Qwen3, Gemma 3).
        attention_bias: biases of q, k and v (Qwen2).
        post_norms: norms after attention and after the MLP too (Gemma).
        norm_offset: what is added to each RMSNorm weight: 1.0 for Gemma in Hugging Face's layout, else 0.0.
        embedding_scale: what embeddings are multiplied with: hidden_size ** 0.5 for Gemma.
        attention_softcap, logits_softcap: c * tanh(x / c); None where unused.
        tie_word_embeddings: the output matrix is the embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    query_scale: float
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    sliding_window: int | None = None
    windowed_layers: tuple[bool, ...] = ()
    hidden_act: str = "silu"
    qk_norm: bool = False
    attention_bias: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    tie_word_embeddings: bool = False
