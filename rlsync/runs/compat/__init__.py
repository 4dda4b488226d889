"""All uses of TorchRL's private names by the runs: what each is for, and until when.

As in ``rlsync.torchrl_plugin.compat``, which has those of the plug: written against torchrl 0.14.1 (2026-11);
"Until" begins the sentence that says what will let a function go.
"""
