"""From logits to tokens to text: sampling, stop strings, detokenisation, speculation. numpy only."""
