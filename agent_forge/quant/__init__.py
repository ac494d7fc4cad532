"""Weights in few bits: codecs, bit packing, packed models.

| file | what is in it |
|---|---|
| codecs.py | from a matrix to codes and scales and back: ternary rows, integers in groups, steps |
| bits.py | codes into bytes: five trits a byte, integers of any number of bits |
| entropy.py | codes into as few bytes as their distribution allows |
| layers.py | which codec each matrix of a network gets; layers that compute and train rounded |
| packed.py | the tensors of a packed model, and its record in config.json |
"""
