"""Phase 4, BitNet: weights of -1, 0 and 1 that keep what the model knows.

| file | what is in it |
|---|---|
| config.py | BitNetSettings; torch-free |
| calibration.py | what each kind of matrix costs when it alone is rounded |
| rounding.py | training through the rounding, and what is put back |
| phase.py | BitNetPhase: calibrate, round, train on, put back what costs too much, pack |

Codecs and packed files are in quant/, lessons about thinking in train/lessons.py.
"""
