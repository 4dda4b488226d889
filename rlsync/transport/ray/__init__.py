"""Versions on a Ray cluster: who runs the relay, and brings it messages, images and the time.

``learner.py`` is the learner's end, ``receiver.py`` runs on each node and keeps an ordinary board supplied,
and ``mailbox_actor.py`` stands between them. The images travel through Ray's object store.
"""
