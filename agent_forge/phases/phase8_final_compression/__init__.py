"""Phase 8, Final compression: the smallest file that still does what the model does.

| file | what is in it |
|---|---|
| config.py | FinalCompressionSettings; torch-free |
| points.py | points of the curve of size and quality: trained, judged, kept or taken back |
| phase.py | FinalCompressionPhase: go down the curve, measure, hand over what holds |
"""
