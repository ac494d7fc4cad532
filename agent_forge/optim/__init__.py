"""MuonGrokfast: orthogonal updates for matrices, AdamW for the rest, slow gradients amplified."""
