"""Merging weights tensor by tensor: methods, the eight combos, recipes, checks, one writer.

| file | what is in it |
|---|---|
| recipe | a merge as YAML: mergekit's fields and ours, validated |
| plan | from a recipe and its parents to one TensorMerge for each output tensor |
| tensor_inputs | the inputs of one tensor, read in runs; inner products, thresholds, masks |
| methods | the standard methods, each a small function |
| selection | methods that choose element by element |
| spectral | methods by singular vectors and by inputs; the correction `svc` |
| combos | the six techniques and their eight combinations |
| engine | `merge`: weights that are computed when they are asked for |
| vocabulary | vocabularies that differ, made equal |
| preflight | what could go wrong and what it will take, before any work |
| output | the writer of model folders |
"""
