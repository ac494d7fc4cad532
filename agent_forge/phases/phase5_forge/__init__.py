"""Phase 5, Forge: training at the edge of what the model can do, and beyond it without answers.

| file | what is in it |
|---|---|
| config.py | ForgeSettings; torch-free |
| edge.py | items of a family by size: asked, solved, taught, drawn |
| own_thoughts.py | thoughts of its own about longer items: by splitting, by a verifier, by a vote |
| rounds.py | EdgeTraining: the stages of training, what is lost by them, what is taken back |
| phase.py | ForgePhase: assess, train at the edge, go beyond it in rounds, compare, hand over |

The adaptive test is in evals/ability.py, the self-model in train/self_model.py.
"""
