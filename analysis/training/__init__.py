"""Training of the pair that is installed with ddtree, in torch: two commands of at most ten minutes of one H200.

    python -m ddtree.analysis.training.train_target --work WORK --out OUT     # corpus, target, its continuations
    python -m ddtree.analysis.training.train_drafter --work WORK --out OUT    # drafter
    python -m ddtree.analysis.training.evaluate --pair OUT                    # acceptance, by the engine, on a CPU

Needs the extra ``train``. WORK holds what the second command takes from the first, OUT the pair's files.
"""
