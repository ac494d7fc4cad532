"""Weights in few bits: codecs, bit packing, packed models.

| file | what is in it |
|---|---|
| codecs.py | from a matrix to codes and scales and back: ternary rows, integers in groups |
| bits.py | codes into bytes: five trits a byte, integers of any number of bits |
| packed.py | the tensors of a packed model, and its record in config.json |
"""
