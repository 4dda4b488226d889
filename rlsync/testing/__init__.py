"""Tests for what others add to rlsync. They need ``rlsync[testing]``, and nothing else of rlsync loads them.

``pytest --pyargs rlsync.testing`` holds every transport of an installed package to the laws of
:mod:`rlsync.transport.contract`: those among its entry points ``rlsync.transports``, and rlsync's board.
"""
