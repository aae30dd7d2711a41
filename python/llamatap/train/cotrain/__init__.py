"""Co-training: a drafter in use is retrained on its own traffic by another process, and replaced meanwhile.

The two sides share nothing but a folder (:mod:`llamatap.train.cotrain.folder`): the serving side
(:mod:`llamatap.train.cotrain.cotrainer`) writes samples and takes new draft files, the trainer
(:mod:`llamatap.train.cotrain.trainer`) reads the ones and writes the others. Only the trainer needs PyTorch.
"""
