"""Questions of ``rlsync explain`` and ``rlsync doctor`` to a live trainer and a machine, and what follows."""
