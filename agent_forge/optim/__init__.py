"""MuonGrokfast: orthogonal updates for matrices, AdamW for the rest, slow gradients amplified.

| file | what is in it |
|---|---|
| config.py | MuGrokConfig: the settings, and those of each phase; torch-free |
| muon.py | MuonGrokfast: the optimizer, with Grokfast and QK-clip |
"""
