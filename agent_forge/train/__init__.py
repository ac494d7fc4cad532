"""Training: the one loop that every training phase shares, and what it is fed with.

| file | what is in it |
|---|---|
| config.py | TrainSettings, CorpusSettings, LessonSettings, the schedule of the rate; torch-free |
| corpus.py | Corpus: generated tasks, datasets and own texts; mixtures, curriculum, unseen items |
| exchange_rows.py | what is taught about tools and a persona |
| lessons.py | what is taught about thinking: thoughts, direct answers, pauses |
| prompt_baking.py | PromptBakingLoss: KL to the prompted self; answers that are sampled for it |
| bake.py | bake: a copy of a network that behaves as if a prompt stood before |
| lora.py | LoRA on the linear layers of any network, folded into its weights in the end |
| fit.py | fit_corpus, fit (the loop over any batches), EarlyStop, DistillationLoss |
| trainer.py | Trainer: one update at a time, within the memory there is |
| weight_transforms.py | LoRA and other transforms as parametrisations of weights |
"""
