"""What a model can do, measured.

domains             examples that share a score, in three disjoint parts; hashes of evaluations
benchmarks          domains by name: generated ones, and published sets from a folder
graders             is a generated answer right?
model_under_test    a model on a domain: tokens, scores, generated answers; confirming a saved model
likelihood          the fast reading of transformers models, in threads and bfloat16; the probe
fitness             one number for a candidate, from domains or by the user's own code; racing
replies             what a model says and calls with real tools, and which replies are right
comparison          is one model better than another? Paired tests, intervals, tables, sentences
ensemble            several models as one, by the mean of their probabilities
lm_eval_harness     tasks of lm-evaluation-harness
"""
