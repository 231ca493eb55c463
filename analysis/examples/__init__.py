"""Six scripts to begin with, each of 40 lines or fewer. Copy one into a folder of your own, run it, and change it.

``own_kernel.py``
    An operation of your own, held to the contract.
``huggingface_ngrams.py``
    Decode with a Hugging Face model and drafts that need no training, and plot τ by node budget.
``own_policy.py``
    Replay a recorded trace under a policy of your own, beside those that come along.
``draw_tree.ipynb``
    Draft trees, and what was accepted of them, as pictures in a notebook.
``hidden_states.py``
    Load a checkpoint and print the hidden states of each layer.
``several_gpus.py``
    Continue many prompts on every GPU that is visible, one process each.
"""
