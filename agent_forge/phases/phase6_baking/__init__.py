"""Phase 6, Baking: tools and a persona inside the weights.

| file | what is in it |
|---|---|
| config.py | BakingSettings; torch-free |
| persona.py | the persona of a name or of a file |
| cycles.py | rounds of tools and persona in turn, kept or taken back |
| prompted.py | the KL to the prompted model, beside what is known |
| phase.py | BakingPhase: measure, bake, measure, hand over |
| personas/ | who a model can become |
| bake_prompt.py | forge bake: any prompt into any causal language model, beside the pipeline |
| questions.json | what is asked while a prompt is baked, unless other questions are given |

Tools are in infer/tools.py, what is said with them in data/exchanges.py; it is taught by
train/exchange_rows.py and asked by evals/replies.py.
"""
