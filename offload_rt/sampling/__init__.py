"""From logits to tokens: sampling, token trees, and the rules that keep speculation lossless."""
